"""The meta-solver: chooses the searcher that proposes next. A multi-armed bandit with a sliding window and AUC credit.

AIACC-Training (section VI) maximises AUC_t + C * sqrt(2 lg|H| / H_t) over the techniques t, as OpenTuner does (Ansel et
al. 2014, section 3.2.1). Two things that the paper leaves open are decided as in OpenTuner's code (jansel/opentuner,
search/bandittechniques.py): lg is the logarithm to base 2, and AUC_t is a share of the largest possible area, so that
it lies between 0 and 1 however often t was used.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

__all__ = ["AucBandit"]


class AucBandit:
    """Ranks the names of techniques by what they found lately and how little they were tried. Pure and without chance.

    Args:
        names: the techniques; of those with equal scores the one that is named first goes first. (OpenTuner draws lots;
            all ranks must decide alike.)
        c: weight of exploration. The paper's default. More of it gives each technique the same share.
        window: |H|'s limit, in trials. Older ones are forgotten, so that a technique that was lucky at the start does not lead
            forever.
    """

    def __init__(self, names: Sequence[str], *, c: float = 0.2, window: int = 50) -> None:
        if not names or len(set(names)) != len(names) or window < 1 or c < 0:
            raise ValueError("a bandit needs different names, a window of at least 1 and c of at least 0")
        self.names = tuple(names)
        self.c = c
        self._history: deque[tuple[str, bool]] = deque(maxlen=window)

    def order(self) -> list[str]:
        """All techniques, the one to use next first."""
        return sorted(self.names, key=lambda name: (-self.score(name), self.names.index(name)))

    def credit(self, name: str, improved: bool) -> None:
        """Note a trial of a technique, and whether it delivered a new global best."""
        if name not in self.names:
            raise ValueError(f"{name} is not one of {', '.join(self.names)}")
        self._history.append((name, improved))

    def score(self, name: str) -> float:
        return self.auc(name) + self.c * self.exploration(name)

    def auc(self, name: str) -> float:
        """The area under the curve that goes one up with each new best and on level otherwise, over the largest one.

        A new best in the i-th of n uses lifts the curve from there on; OpenTuner counts it as i of n (n + 1) / 2, so that
        late ones weigh more than early ones. The paper's words do not tell this from its mirror image (area to the right
        of the rise); its formula and the work that it cites do.
        """
        outcomes = [improved for used, improved in self._history if used == name]
        if not outcomes:
            return 0.0
        area = sum(position for position, improved in enumerate(outcomes, 1) if improved)
        return 2 * area / (len(outcomes) * (len(outcomes) + 1))

    def exploration(self, name: str) -> float:
        """sqrt(2 lg|H| / H_t); infinite for a technique that the window does not hold."""
        uses = sum(used == name for used, _ in self._history)
        return math.sqrt(2 * math.log2(len(self._history)) / uses) if uses else math.inf
