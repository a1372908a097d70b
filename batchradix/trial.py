"""What a user may ask for to look before and after a whole run: a sample, a price, right answers.

None of it changes what a row is answered, so none of it is part of a job's identity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from batchradix.errors import OptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOptions:
    """``sample``: how many of the input's rows run, chosen over all of it by ``sample_seed`` (None:
    the run's seed); a larger sample of one seed holds the smaller ones. ``price_per_hour``: what
    an hour of this machine costs, for the estimate of the whole job. ``gold``: the input column of
    right answers that answers are held against."""

    sample: int | None = None
    sample_seed: int | None = None
    price_per_hour: float | None = None
    gold: str | None = None

    def __post_init__(self) -> None:
        if self.sample is not None and (type(self.sample) is not int or self.sample < 1):
            raise OptionError(f"`sample` must be an integer of at least 1, not {self.sample!r}")
        seed = self.sample_seed
        if seed is not None and (type(seed) is not int or not -(2**63) <= seed < 2**63):
            raise OptionError(f"`sample_seed` must be an integer of 64 bits, not {seed!r}")
        price = self.price_per_hour
        is_number = isinstance(price, (int, float)) and not isinstance(price, bool)
        if price is not None and not (is_number and 0 <= price < math.inf):
            raise OptionError(f"`price_per_hour` must be 0 or more, not {price!r}")
        for name, value in (("sample_seed", seed), ("price_per_hour", price)):
            if value is not None and self.sample is None:
                raise OptionError(f"`{name}` is about a sample; give `sample` as well")
        if self.gold is not None and (not isinstance(self.gold, str) or not self.gold):
            raise OptionError(f"`gold` must be the name of a column, not {self.gold!r}")
