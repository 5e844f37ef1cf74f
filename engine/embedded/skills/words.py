"""Word lists that the skills draw from."""

from random import Random


def split(words: str) -> list[str]:
    return words.split()


NAMES = split(
    "Anna Ben Clara David Emma Felix Grace Henry Iris Jack Karen Leo Maria Noah Olivia Paul Quinn Rosa Sam Tina "
    "Umar Vera Walter Yara Zoe Alice Bob Carol Daniel Eva Frank Gina Hugo Ida Jonas Kim Laura Marco Nina Oscar "
    "Peter Ruth Simon Tara Victor Wendy Xavier Yusuf Lena Omar Priya Chen Diego Fatima Ivan Mei Raj Sofia Tom "
    "Lucy"
)
CITIES = split(
    "Paris London Berlin Rome Madrid Oslo Vienna Prague Dublin Athens Lisbon Warsaw Helsinki Stockholm Tokyo "
    "Kyoto Beijing Delhi Mumbai Cairo Lagos Nairobi Sydney Melbourne Toronto Montreal Chicago Boston Denver "
    "Seattle Lima Bogota Santiago Havana Istanbul Moscow Seoul Bangkok Hanoi Manila Singapore Zurich Geneva "
    "Munich Hamburg Milan"
)
NOUNS = split(
    "apple bridge candle desk engine falcon garden hammer island jacket kettle lamp mirror needle ocean pencil "
    "quilt river saddle table umbrella violin window yacht zebra anchor basket castle drum eagle forest guitar "
    "harbor iron jungle key ladder mountain notebook orange piano rabbit ship tower valley wagon badge camera "
    "door elephant flag glove hotel ink jar kite lemon market nest owl paper queen rope spoon train village wheel "
    "box bottle chair clock dragon feather ghost horse insect jewel king lion moon night onion pillow ring stone "
    "tiger uniform vase whale robot rocket museum library factory office school station airport bakery cinema "
    "farm hospital kitchen theater"
)
ADJECTIVES = split(
    "red blue green yellow purple black white silver golden old new small large quiet loud bright dark cold warm "
    "fast slow heavy light round square soft hard sweet bitter brave calm clever gentle happy honest lazy lucky "
    "polite proud silent strong wise wild ancient broken empty frozen hidden lonely modern narrow rusty secret "
    "shiny tiny wooden"
)
COLORS = split("red blue green yellow purple black white orange pink brown gray violet")
FOODS = split(
    "apple banana bread cheese cherry carrot grape honey lemon mango melon olive onion peach pear pizza plum rice "
    "salad soup tomato"
)
ANIMALS = split(
    "ant bear bird cat cow deer dog duck eagle fish fox frog goat horse lion monkey mouse owl rabbit sheep tiger "
    "whale wolf"
)
SYLLABLES = split(
    "ba be bo da de do fa fi ga go ka ki ko la le li lo ma mi mo na ne no pa pe po ra re ri ro sa se si so ta te "
    "ti to va vi za zo"
)
VERBS = split(
    "get set find create update delete send open close start stop check list search move add remove book play show"
)
LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"


def number(rng: Random, low_digits: int = 4, high_digits: int = 7) -> str:
    digits = rng.randint(low_digits, high_digits)
    return str(rng.randint(10 ** (digits - 1), 10**digits - 1))


def code(rng: Random) -> str:
    return "".join(rng.choice(LETTERS + "23456789") for _ in range(rng.randint(4, 7)))


def invented(rng: Random) -> str:
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 4)))


def phrase(rng: Random) -> str:
    return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"


def passphrase(rng: Random) -> str:
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}-{rng.randint(2, 99)}"


def word(rng: Random) -> str:
    return rng.choice(rng.choice((NOUNS, ADJECTIVES, COLORS, FOODS, ANIMALS)))


def listed(items: list[str]) -> str:
    """a, b and c"""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]
