"""One row's answer out of a few, with the probability of each of them.

Every place where choices part is visited, depth first: its path goes through the model, the
logits of the tokens that the choices allow there are kept, and the row is taken back to where the
next path parts from this one. The answer is chosen at the end.

The probability of a choice is the product, over the places where it parts from others, of the
softmax of the model's logits over the tokens that the choices allow there, at temperature 1 and
before any penalty. It is what sampling under the choices would give each of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from batchradix.engine.answer import Answer
from batchradix.engine.grammar.choices import ChoiceState, CompiledChoices, TrieNode
from batchradix.engine.output import RowOutput
from batchradix.errors import RowError, RowErrorCode
from batchradix.types import RowSettings, Usage


class ScoredAnswer(Answer):
    """An answer that is chosen after all choices were scored.

    Under ``settings.choose == "walk"`` it is what the sampler took at each place on its way, so
    the same as without scores; under ``"joint"`` the choice of the largest probability, the first
    of equal ones. ``output`` gets its tokens when it is chosen, or an error where ``max_tokens``
    does not hold the longest choice.
    """

    def __init__(
        self,
        *,
        settings: RowSettings,
        rng_key: np.uint64,
        output: RowOutput,
        usage: Usage,
        choices: CompiledChoices,
        max_tokens: int,
    ) -> None:
        super().__init__(
            settings=settings, rng_key=rng_key, output=output, forced=None, usage=usage
        )
        self._choices = choices
        self._state = ChoiceState(choices)
        self._path: list[int] = []
        self._num_opening = 0
        self._next = 0  # among the branches, the one to be visited
        self._taken: dict[TrieNode, int] = {}  # what the sampler took there
        # Natural logarithms: of the step to a node, and of ending at one where others go on.
        self._steps: dict[TrieNode, float] = {}
        self._ends: dict[TrieNode, float] = {}
        if max_tokens < choices.num_longest:
            output.fail(
                RowError(
                    RowErrorCode.BAD_SETTING,
                    f"max_tokens (or what the context leaves for the answer) is {max_tokens}, and "
                    f"the longest choice has {choices.num_longest} tokens, which its probability "
                    f"needs; raise --max-tokens",
                )
            )

    @property
    def grammar(self) -> ChoiceState:
        """Where the row is, which is not yet its answer."""
        return self._state

    @property
    def generated_ids(self) -> Sequence[int]:
        return self._path

    @property
    def num_generated(self) -> int:
        return len(self._path)

    @property
    def allowed_ids(self) -> NDArray[np.int64]:
        """int64[n], ascending: the tokens whose logits `score` wants; n is 0 outside branches."""
        node = self._state.node
        return self._choices.tokens_at(node) if node.is_branch else np.zeros(0, dtype=np.int64)

    def open(self, token_ids: Sequence[int]) -> None:
        """Begins with tokens that stand behind the prompt already."""
        self._num_opening = len(token_ids)
        self._move(token_ids)
        super().open(token_ids)  # a stop string in it ends the answer, without any probability
        if not self._choices.branches and self.output.error is None:
            self._set_logprobs()  # there is one choice alone

    def score(self, logits: NDArray[np.float64]) -> None:
        """Takes the logits of `allowed_ids`: float64[n], finite or -inf, one finite at least."""
        node = self._state.node
        logprobs = logits - np.logaddexp.reduce(logits)
        end = -np.inf
        for token_id, logprob in zip(self.allowed_ids.tolist(), logprobs.tolist(), strict=True):
            if token_id in node.children:
                self._steps[node.children[token_id]] = logprob
            else:  # any end-of-sequence token ends the choice
                end = float(np.logaddexp(end, logprob))
        if node.choice is not None:
            self._ends[node] = end

    def take(self, token_id: int) -> list[int]:
        """Notes the token that the sampler took; the tokens to the next place, which follow the
        first ``num_kept`` of the row. Ends the answer after the last place."""
        node = self._state.node
        branches = self._choices.branches
        if node.is_branch:
            self._taken[node] = token_id
            self._next += 1
        if self._next == len(branches):
            self._choose()
            return []
        path = branches[self._next].path()
        shared = 0
        while shared < len(self._path) and self._path[shared] == path[shared]:
            shared += 1
        self.num_kept = shared - self._num_opening
        self._state.rollback(len(self._path) - shared)
        del self._path[shared:]
        self._move(path[shared:])
        return path[shared:]

    def _move(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._state.accept(token_id)
        self._path += token_ids

    def _set_logprobs(self) -> None:
        logprobs = [0.0] * len(self._choices.texts)
        waiting = [(self._choices.root, 0.0)]
        while waiting:
            node, logprob = waiting.pop()
            if node.choice is not None:
                logprobs[node.choice] = logprob + self._ends.get(node, 0.0)
            for child in node.children.values():
                waiting.append((child, logprob + self._steps.get(child, 0.0)))
        self.choice_logprobs = tuple(logprobs)

    def _choose(self) -> None:
        """Hands the tokens of the chosen answer to the output."""
        self._set_logprobs()
        for token_id, was_chosen in self._chosen()[self._num_opening :]:
            if self.output.finish_reason is not None:
                return  # a stop string cut it short
            self._push(token_id, is_forced=not was_chosen)

    def _chosen(self) -> list[tuple[int, bool]]:
        """The tokens of the chosen answer, and whether there was a choice at each."""
        node = self._choices.root
        wanted: list[int] = []
        if self.settings.choose == "joint":
            assert self.choice_logprobs is not None
            best = int(np.argmax(self.choice_logprobs))
            wanted = self._choices.ends[best].path()
        found: list[tuple[int, bool]] = []
        while node.children:
            if not node.is_branch:
                [token_id] = node.children
            elif self.settings.choose != "joint":
                token_id = self._taken[node]
            elif node.depth < len(wanted):
                token_id = wanted[node.depth]
            else:
                token_id = self._choices.stop_ids[0]
            found.append((token_id, node.is_branch))
            if token_id not in node.children:
                break
            node = node.children[token_id]
        return found
