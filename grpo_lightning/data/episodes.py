"""Problems for the environments calculator and guess, each with a demonstration of an episode for module=sft.

Row i is a function of the seed and of i. Demonstrations are mediocre on purpose: most do not use what the environment
offers, so that there is something to learn for a policy that has been taught by them.
"""

import random
from collections.abc import Sequence

from grpo_lightning.data.source import Made, Row, rate
from grpo_lightning.types import Message


class Products(Made):
    """Problems such as ``Calculate 473*86.``, whose column ``answer`` is ``40678``; all answers have five digits.

    The column ``completion`` demonstrates a calculator's use, ``calc(473*86)=``, or the mere right answer.

    Args:
        size: How many there are.
        seed: Of the first one; that of the next one is greater by 1.
        call_rate: Share of the demonstrations that ask the calculator.
    """

    def __init__(self, size: int, seed: int, call_rate: float) -> None:
        super().__init__(size, seed)
        self._call_rate = rate("call_rate", call_rate)

    def _row(self, number: int) -> Row:
        rng = random.Random(f"Products {number}")
        first, second = rng.randint(334, 999), rng.randint(32, 99)
        result = str(first * second)
        turns = [f"<answer>{result}</answer>"]
        if rng.random() < self._call_rate:
            turns = [f"calc({first}*{second})=", result, *turns]
        return f"Calculate {first}*{second}.", {"answer": result, "completion": _messages(turns)}


class Numbers(Made):
    """Games in which a number from 1 to ``highest`` is guessed, which the prompt does not tell.

    It is the column ``number``, and as a text the column ``answer``; ``highest`` games in a row have each number once.
    The column ``completion`` demonstrates a game. In some games the player is careful, and guesses a number in the
    middle third of those that the replies have left; in the others the player guesses any number, whatever was replied.

    Args:
        size: How many games there are.
        seed: Of the first one; that of the next one is greater by 1.
        highest: The greatest number.
        guesses: How many guesses there are in a game.
        careful_rate: Share of the games with a careful player.
    """

    def __init__(self, size: int, seed: int, highest: int, guesses: int, careful_rate: float) -> None:
        super().__init__(size, seed)
        for name, count in (("highest", highest), ("guesses", guesses)):
            if count < 1:
                raise ValueError(f"{name}: {count}; allowed: 1 or more")
        self._highest, self._guesses, self._careful_rate = highest, guesses, rate("careful_rate", careful_rate)

    def _row(self, number: int) -> Row:
        rng = random.Random(f"Numbers {number}")
        number = number % self._highest + 1
        prompt = f"Guess my number from 1 to {self._highest}. You have {self._guesses} guesses."
        completion = _messages(self._game(number, rng))
        return prompt, {"number": number, "answer": str(number), "completion": completion}

    def _game(self, number: int, rng: random.Random) -> list[str]:
        """Guesses in turn with the replies to them, up to the right guess or the last one that is allowed."""
        turns: list[str] = []
        least, most = 1, self._highest
        is_careful = rng.random() < self._careful_rate
        for _ in range(self._guesses):
            third = (most - least + 1) // 3
            guessed = rng.randint(least + third, most - third) if is_careful else rng.randint(1, self._highest)
            turns.append(str(guessed))
            if guessed == number:
                break
            if guessed < number:
                least = guessed + 1
            else:
                most = guessed - 1
            turns.append("higher" if guessed < number else "lower")
        return turns if len(turns) % 2 else turns[:-1]


def _messages(turns: Sequence[str]) -> list[Message]:
    """The assistant's turns and the user's replies to them, in turn."""
    return [{"role": "user" if number % 2 else "assistant", "content": text} for number, text in enumerate(turns)]
