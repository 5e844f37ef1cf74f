// One case of the OpenAI SDK for Node: node openai.cjs CASE BASE_URL, with NODE_PATH at its packages. Prints JSON.
const OpenAI = require("openai");
const { zodResponseFormat, zodTextFormat, zodFunction } = require("openai/helpers/zod");
const { z } = require("zod");

const [name, baseURL] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "any-key", maxRetries: 0, timeout: 30000 });
const model = "scripted";
const ask = (content, more = {}) => ({ model, messages: [{ role: "user", content }], ...more });
const Bird = z.object({ name: z.string(), wings: z.number() });
const usage = ({ prompt_tokens, completion_tokens }) => [prompt_tokens, completion_tokens];

async function caught(promise) {
  try {
    await promise;
  } catch (error) {
    const { status, code, param, type, message } = error;
    return { class: error.constructor.name, status, code, param, type, message };
  }
  return null;
}

async function read(stream) {
  let text = "";
  for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
  return text;
}

const readFile = (seen) => ({
  type: "function",
  function: {
    name: "read_file",
    description: "Reads a file.",
    parse: JSON.parse,
    function: (given) => (seen.push(given), `contents of ${given.path}: a heron`),
    parameters: { type: "object", properties: { path: { type: "string" }, limit: { type: "integer" } } },
  },
});

const cases = {
  async stream() {
    const whole = await client.chat.completions.create(ask("say hello"));
    const stream = await client.chat.completions.create(
      ask("say hello", { stream: true, stream_options: { include_usage: true } }),
    );
    const chunks = [];
    for await (const chunk of stream) chunks.push(chunk);
    const choices = chunks.flatMap((chunk) => chunk.choices);
    return {
      text: choices.map((choice) => choice.delta.content ?? "").join(""),
      thought: choices.map((choice) => choice.delta.reasoning_content ?? "").join(""),
      reasons: choices.map((choice) => choice.finish_reason).filter(Boolean),
      usage: usage(chunks.at(-1).usage),
      whole: { text: whole.choices[0].message.content, usage: usage(whole.usage) },
    };
  },

  async helper() {
    const events = [];
    const stream = client.chat.completions
      .stream(ask("say hello"))
      .on("content", () => events.push("content"))
      .on("content.done", ({ content }) => events.push(content));
    const end = await stream.finalChatCompletion();
    return { text: end.choices[0].message.content, reason: end.choices[0].finish_reason, events: [...new Set(events)] };
  },

  async tools() {
    const results = {};
    for (const stream of [false, true]) {
      const seen = [];
      const runner = client.chat.completions.runTools(ask("read it", { stream, tools: [readFile(seen)] }));
      results[stream] = { text: await runner.finalContent(), seen, messages: runner.messages.map((one) => one.role) };
    }
    return results;
  },

  async parse() {
    const format = zodResponseFormat(Bird, "bird");
    const whole = await client.chat.completions.parse(ask("as json", { response_format: format }));
    const streamed = await client.chat.completions.stream(ask("as json", { response_format: format })).finalChatCompletion();
    const tools = [zodFunction({ name: "read_file", parameters: z.object({ path: z.string(), limit: z.number() }) })];
    const call = await client.chat.completions.parse(ask("read it", { tools }));
    return {
      whole: whole.choices[0].message.parsed,
      streamed: streamed.choices[0].message.parsed,
      call: call.choices[0].message.tool_calls[0].function.parsed_arguments,
    };
  },

  async cut() {
    const format = zodResponseFormat(Bird, "bird");
    return await caught(client.chat.completions.parse(ask("as json", { response_format: format, max_tokens: 12 })));
  },

  async responses() {
    const whole = await client.responses.parse({ model, input: "as json", text: { format: zodTextFormat(Bird, "bird") } });
    const stream = client.responses.stream({ model, input: "say hello" });
    const kinds = [];
    for await (const event of stream) kinds.push(event.type);
    const end = await stream.finalResponse();
    const next = await client.responses.create({ model, input: "say hello", previous_response_id: end.id });
    return { parsed: whole.output_parsed, text: end.output.at(-1).content[0].text, first: kinds[0], last: kinds.at(-1), next: next.output_text };
  },

  async errors() {
    const long = "word ".repeat(40000);
    return {
      model: await caught(client.chat.completions.create({ ...ask("hi"), model: "gpt-9" })),
      value: await caught(client.chat.completions.create(ask("hi", { temperature: 7 }))),
      long: await caught(client.chat.completions.create(ask(long))),
      longStream: await caught(client.chat.completions.create(ask(long, { stream: true }))),
      longResponse: await caught(client.responses.create({ model, input: long })),
      midway: await caught(client.chat.completions.create(ask("fail midway", { stream: true })).then(read)),
      whole: await caught(client.chat.completions.create(ask("fail midway"))),
    };
  },

  async abort() {
    const stream = await client.chat.completions.create(ask("count slowly", { stream: true }));
    let chunks = 0;
    for await (const chunk of stream) if (++chunks === 3) break;
    const controller = new AbortController();
    const pending = caught(client.chat.completions.create(ask("count slowly"), { signal: controller.signal }));
    setTimeout(() => controller.abort(), 300);
    const late = await caught(client.chat.completions.create(ask("count slowly"), { timeout: 300 }));
    return { chunks, pending: await pending, late };
  },

  async models() {
    const models = [];
    for await (const one of client.models.list()) models.push([one.id, one.max_model_len]);
    return models;
  },
};

cases[name]().then(
  (result) => console.log(JSON.stringify(result)),
  (error) => (console.error(error), process.exit(1)),
);
