"""How many tokens stayed in rounds of drafting."""

from __future__ import annotations

import dataclasses
import itertools


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Rounds of drafting. kept: in how many of them 1, 2, 3, ... tokens stayed. Two can be added."""

    kept: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self.kept)

    @property
    def tokens(self) -> int:
        """Tokens that stayed."""
        return sum(number * count for number, count in enumerate(self.kept, 1))

    @property
    def right(self) -> tuple[float, ...]:
        """For the first, second, ... draft of a round, as far as any round came: how often it was right where all
        before it were."""
        reached = list(itertools.accumulate(reversed(self.kept)))[::-1]
        return tuple(after / before for before, after in itertools.pairwise(reached) if before)

    def __add__(self, other: Rounds) -> Rounds:
        return Rounds(tuple(map(sum, itertools.zip_longest(self.kept, other.kept, fillvalue=0))))

    def __bool__(self) -> bool:
        return any(self.kept)

    def __str__(self) -> str:
        if not self:
            return "no rounds"
        right = ", ".join(f"{share:.0%}" for share in self.right)
        return f"{self.tokens:,} tokens in {self.count:,} rounds, {self.tokens / self.count:.1f} in each; drafts right by place: {right}"


NO_ROUNDS = Rounds()
