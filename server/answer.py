"""An admitted request being answered: its choices, and the engine's work behind them."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import engine
from server.answers import Usage
from server.auth import Caller
from server.choice import Choice, Delta, usage
from server.errors import BadRequestError
from server.generation import Generation
from server.grammar import AnswerForm, ThoughtBudget, constraint_of
from server.model import ServedModel
from server.pipeline import TextRules
from server.prompt import Prompt
from server.protocol import to_json
from server.sampling import SEED_MASK
from server.serving import Serving

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """What every API writes its answer from."""

    answer_id: str
    model: str
    created: int
    choices: Sequence[Choice]
    num_prompt_tokens: int
    generation: Generation
    is_accounted: bool = False

    async def next(self) -> list[tuple[int, Delta]]:
        """What has arrived, with the index of its choice; nothing when all is said. raises engine.EngineError"""
        events = await self.generation.next()
        deltas = [(index, self.choices[index].push(event)) for index, event in events]
        for index, event in events:
            # a stop string or a last call ends an answer before the engine would
            if event.finish_reason is None and self.choices[index].finish_reason is not None:
                await self.generation.end(index)
        return deltas

    async def close(self) -> None:
        await self.generation.close()

    def usage(self) -> Usage:
        return usage(self.choices, self.num_prompt_tokens)


async def start_answer(
    serving: Serving,
    model: ServedModel,
    caller: Caller,
    prompts: Sequence[Prompt],
    rules: TextRules,
    sampling: Callable[[Prompt], engine.SamplingParams],
    *,
    prefix: str,
    num_choices: int = 1,
    form: AnswerForm | None = None,
    budget: ThoughtBudget | None = None,
) -> Answer:
    """Returns once the engine has admitted or queued all of it. raises what the engine refuses it with

    form    what the answer has to be, where that is asked for
    budget  of its thought

    Choice p * num_choices + c answers prompt p.
    """
    _check_room(len(prompts), num_choices, model.info)
    answer_id = f"{prefix}{secrets.token_hex(12)}"
    requests: list[engine.Request] = []
    choices: list[Choice] = []
    for prompt in prompts:
        if not prompt.token_ids:
            raise BadRequestError("prompt is empty; send at least one character.", param="prompt")
        params = sampling(prompt)
        own_rules = replace(
            rules,
            starts_in_thought=prompt.starts_in_thought,
            splits_reasoning=rules.splits_reasoning and not prompt.starts_in_content,
            calls_end_thought=form is None and serving.config.calls_end_thought,
        )
        if form is not None or budget is not None:
            found = await model.in_worker(constraint_of, form, budget, prompt.starts_in_thought, model.thought_end)
            params = replace(params, constraint=found)
        for index in range(num_choices):
            request_id = f"{answer_id}-{len(requests)}"
            requests.append(
                engine.Request(
                    request_id, prompt.token_ids, _seeded(params, index), caller.tenant, caller.priority, prompt.marks
                )
            )
            choices.append(Choice(own_rules, model.files.vocabulary))
    return Answer(
        answer_id=answer_id,
        model=model.name,
        created=int(time.time()),
        choices=choices,
        num_prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
        generation=await serving.generate(requests),
        is_accounted=caller.is_gateway,
    )


def _check_room(num_prompts: int, num_choices: int, info: engine.EngineInfo) -> None:
    """Choices are admitted together or not at all. raises BadRequestError when an idle engine had no room for them"""
    if info.max_queued_requests is None:
        return
    count, room = num_prompts * num_choices, info.max_num_requests + info.max_queued_requests
    if count > room:
        raise BadRequestError(
            f"n: {num_prompts} prompts and n {num_choices} make {count} generations; this server takes {room} at once: "
            f"{info.max_num_requests} that run (max_num_requests) and {info.max_queued_requests} that wait "
            "(max_queued_requests).",
            param="n",
        )


def end_of_stream(answer: Answer) -> bytes:
    """The marker, and for the gateway a comment that tells the usage whether or not the client asked for it.

    The comment comes first: many a reader stops at the marker.
    """
    return (b": usage " + to_json(answer.usage()) + b"\n\n" if answer.is_accounted else b"") + DONE


def _seeded(sampling: engine.SamplingParams, index: int) -> engine.SamplingParams:
    """Choices of one seeded request differ, and differ the same way every time."""
    return sampling if sampling.seed is None else replace(sampling, seed=(sampling.seed + index) & SEED_MASK)
