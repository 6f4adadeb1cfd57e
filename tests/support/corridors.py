"""Functions as a user of gymnasium might have them."""

import gymnasium
from gymnasium import spaces


class Corridor(gymnasium.Env):
    """A walk to the right end of a corridor, which says where one is."""

    action_space = spaces.Discrete(2)

    def __init__(self, length=3, seeded=True):
        self.length, self.seeded = length, seeded
        self.closed = False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(self.length)) if self.seeded else _count()
        return self.place, {}

    def step(self, action):
        self.place += 2 * action - 1
        return self.place, -0.25, self.place == self.length, False, {}

    def render(self):
        return f"at {self.place}"


_made = [0]


def _count():
    _made[0] += 1
    return _made[0]


def corridor(length=3, seeded=True):
    return Corridor(length, seeded)


def lands(observation, info):
    return f"you have {observation[0]}, the dealer shows {observation[1]}"


def hits(turn):
    return 1 if "hit" in turn else 0 if "stick" in turn else None


def numbers(observation, info):
    return 3
