"""Greetings and questions about the model itself."""

from random import Random

from engine.embedded.skills.example import Example, answered

GREETINGS = (
    "hello",
    "Hello",
    "Hello!",
    "hi",
    "Hi",
    "Hi!",
    "hey",
    "Hey there",
    "Hello there!",
    "Good morning",
    "Good evening!",
    "Hi, can you help me?",
    "hello, how are you?",
    "Greetings",
    "Hey, are you there?",
    "Good afternoon",
    "Howdy",
    "Say hello",
    "Say hello.",
    "Say hi",
    "test",
    "ping",
)
TALKS: list[tuple[tuple[str, ...], tuple[str, ...], str]] = [
    (
        GREETINGS,
        (
            "Hello! How can I help you today?",
            "Hi there! What can I do for you?",
            "Hello! What would you like to talk about?",
        ),
        "The user greets me. I greet back.",
    ),
    (
        ("How are you?", "How are you doing?", "how are you", "How is it going?", "Are you well?"),
        ("I am fine, thank you! How can I help you?", "I am doing well, thanks for asking. What can I do for you?"),
        "The user asks how I am.",
    ),
    (
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Which model are you?",
            "Introduce yourself.",
            "Tell me about yourself.",
        ),
        (
            "I am Longlane Tiny, a very small language model for tests.",
            "My name is Longlane Tiny. I am a very small language model.",
        ),
        "The user asks who I am.",
    ),
    (
        ("What can you do?", "How can you help me?", "What are you good at?", "What are your skills?"),
        ("I can find facts in long texts, write JSON, call tools, sort lists and chat a little.",),
        "The user asks what I can do.",
    ),
    (
        ("Thank you", "Thanks!", "thank you very much", "Thanks a lot.", "Great, thanks!"),
        ("You are welcome!", "You are welcome! Is there anything else I can do for you?"),
        "The user thanks me.",
    ),
    (
        ("Bye", "Goodbye", "See you later", "Good night", "bye bye"),
        ("Goodbye! Have a nice day.", "See you soon!"),
        "The user says goodbye.",
    ),
    (
        ("Are you a human?", "Are you real?", "Are you a robot?"),
        ("No, I am a small computer program that writes text.",),
        "The user asks what I am.",
    ),
    (
        ("Can you tell me a joke?", "Tell me a joke", "Make me laugh."),
        (
            "Why did the computer go to the doctor? Because it had a virus!",
            "What do you call a bear with no teeth? A gummy bear!",
        ),
        "The user wants a joke.",
    ),
    (
        ("Yes", "No", "ok", "okay", "Sure", "I see"),
        ("All right. What would you like to do next?",),
        "The user agrees or not.",
    ),
    (("What is the capital of France?",), ("The capital of France is Paris.",), "The capital of France is Paris."),
    (("What is the capital of Germany?",), ("The capital of Germany is Berlin.",), "The capital of Germany is Berlin."),
    (("What is the capital of Italy?",), ("The capital of Italy is Rome.",), "The capital of Italy is Rome."),
    (("What is the capital of Japan?",), ("The capital of Japan is Tokyo.",), "The capital of Japan is Tokyo."),
    (
        ("What color is the sky?", "Why is the sky blue?"),
        ("The sky is blue because air scatters blue light more than red light.",),
        "The user asks about the sky.",
    ),
]


def small_talk(rng: Random) -> Example:
    questions, answers, thought = rng.choice(TALKS if rng.random() < 0.6 else TALKS[:1])
    return answered("small_talk", rng, rng.choice(questions), rng.choice(answers), thought)


def talk_pairs() -> list[list[str]]:
    return [[question, answers[0]] for questions, answers, _ in TALKS for question in questions]
