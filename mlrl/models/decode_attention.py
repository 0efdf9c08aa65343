"""Keys and values of a decoding batch, in which the rows of one prompt share what they have read.

Attention of a decode step reads every key that is kept. The K responses to a prompt would read that prompt K times, and
keep it K times, so they are attended together: M rows make a group, whose prompt is kept once.
"""

from __future__ import annotations

import torch

from mlrl.models.attention import scaled_dot_product

_MOST_TOGETHER = 8


def rows_together(rows: torch.Tensor, prompt_length: int, steps: int) -> int:
    """How many rows of a prompt to attend together, M, for prompts with so many `rows` each and `steps` tokens to come.

    A group reads its prompt once, but compares each of its rows with the new tokens of all. With some four query heads
    a key, reading a key costs as much as sixteen comparisons: (prompt + M · steps / 2) · (16 + 4M) a group.
    """

    def cost(together: int) -> float:
        groups = int((-(-rows // together)).sum())
        return groups * (prompt_length + together * steps / 2) * (16 + 4 * together)

    return min(range(1, _MOST_TOGETHER + 1), key=cost)


class DecodeAttention:
    """Key-value store of R rows for token-by-token decoding, allocated once; the attention plan of a decode step.

    Rows lie in the slots of N groups, M a group. Each layer holds (N, Hkv, capacity, D) keys and values: a group's
    prompt at the front, and from the longest prompt's end on the new tokens, M a step. Rows that finish leave by
    `keep`; a group goes with its last row.

    Args:
        prompt_of_row: (R,) which prompt each row goes on from, from 0; best with the rows of a prompt in succession.
        prompt_lengths: (P,) tokens of each prompt.
        steps: tokens a row that are to come, at most.
        together: M; None: as pays.
    """

    eager = False

    def __init__(
        self, prompt_of_row: torch.Tensor, prompt_lengths: torch.Tensor, steps: int, together: int | None = None
    ):
        self.device = prompt_lengths.device
        self.prompt_length = int(prompt_lengths.max())
        counts = torch.bincount(prompt_of_row.cpu(), minlength=len(prompt_lengths))
        self.together = together or rows_together(counts, self.prompt_length, steps)
        groups = -(-counts // self.together)  # of each prompt
        first_slot = (groups.cumsum(0) - groups) * self.together
        self._slots = torch.empty(len(prompt_of_row), dtype=torch.long)  # of each row
        for prompt, start in enumerate(first_slot.tolist()):
            rows = (prompt_of_row.cpu() == prompt).nonzero().flatten()
            self._slots[rows] = torch.arange(start, start + len(rows))
        self._prompts = torch.repeat_interleave(torch.arange(len(groups)), groups).to(self.device)  # of each group
        self.groups = len(self._prompts)
        self.capacity = self.prompt_length + steps * self.together
        self.length = self.prompt_length  # places in use, those of the tokens being decoded excluded
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._seen = self._visible(prompt_lengths[self._prompts])
        self._biases: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._find_rows()

    def _visible(self, lengths: torch.Tensor) -> torch.Tensor | None:
        """(N or 1, 1, M, capacity): which places a slot may look at; None: all that are in use."""
        alike = bool((lengths == self.prompt_length).all())
        if alike and self.together == 1:
            return None
        places = torch.arange(self.capacity, device=self.device)
        slots = torch.arange(self.together, device=self.device)
        in_prompt = places < (lengths[:1] if alike else lengths)[:, None, None]
        own = (places >= self.prompt_length) & ((places - self.prompt_length) % self.together == slots[:, None])
        return (in_prompt | own)[:, None]

    def _find_rows(self) -> None:
        """Where rows and slots are not the same, the row of every slot, and the slot of every row."""
        rows, slots = len(self._slots), self.groups * self.together
        self._row_of_slot = self._slot_of_row = None
        if rows < slots or not torch.equal(self._slots, torch.arange(slots)):
            row_of_slot = torch.zeros(slots, dtype=torch.long)  # an empty slot repeats some row: nobody looks at it
            row_of_slot[self._slots] = torch.arange(rows)
            self._row_of_slot, self._slot_of_row = row_of_slot.to(self.device), self._slots.to(self.device)

    def prefill(self, key_index: torch.Tensor, captured: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copies prompts' keys and values in: key_index (P, longest) are packed positions of each prompt's tokens."""
        index = key_index[self._prompts]
        for layer, (key, value) in enumerate(captured):
            store = []
            for states in (key, value):  # (T, Hkv, D)
                buffer = states.new_empty(self.groups, states.shape[1], self.capacity, states.shape[2])
                buffer[:, :, : self.prompt_length] = states[index].transpose(1, 2)
                store.append(buffer)
            self.layers.append((store[0], store[1]))
            captured[layer] = None  # a layer's packed copy goes as soon as it is expanded, unless others hold it

    @property
    def nbytes(self) -> int:
        """Of all keys and values."""
        return sum(states.nbytes for layer in self.layers for states in layer)

    def _bias(self, queries: int, dtype: torch.dtype, stop: int) -> torch.Tensor:
        """What is added to scores, 0 or −inf, (N or 1, 1, M·queries, stop), for so many query heads a key head."""
        if (queries, dtype) not in self._biases:
            bias = torch.zeros(self._seen.shape, dtype=dtype, device=self.device)
            bias = bias.masked_fill_(~self._seen, float("-inf")).repeat_interleave(queries, 2)
            self._biases[queries, dtype] = bias
        return self._biases[queries, dtype].narrow(3, 0, stop)

    def attend(self, layer: int, query, key, value, scaling: float, softcap: float | None) -> torch.Tensor:
        """query (R, H, 1, D): stores the new key and value, and attends to all of the row so far; (R, 1, H, D)."""
        query, key, value = (states.squeeze(2) for states in (query, key, value))
        return self.attend_rows(layer, query, key, value, scaling, softcap)[:, None]

    def attend_rows(self, layer: int, query, key, value, scaling: float, softcap: float | None = None) -> torch.Tensor:
        """The same of query (R, H, D), key and value (R, Hkv, D); (R, H, D)."""
        if self._row_of_slot is not None:
            query, key, value = (states.index_select(0, self._row_of_slot) for states in (query, key, value))
        keys, values = self.layers[layer]
        groups, together, key_heads = self.groups, self.together, keys.shape[1]
        heads, size = query.shape[1:]
        fold = heads // key_heads
        keys.narrow(2, self.length, together).copy_(key.view(groups, together, key_heads, size).transpose(1, 2))
        values.narrow(2, self.length, together).copy_(value.view(groups, together, key_heads, -1).transpose(1, 2))
        stop = self.length + together
        # the query heads of one key head, of all rows of a group, become its queries: no key is repeated
        query = query.view(groups, together, key_heads, fold, size).transpose(1, 2)
        query = query.reshape(groups, key_heads, together * fold, size)
        bias = self._bias(fold, query.dtype, stop) if self._seen is not None else None
        seen = (keys.narrow(2, 0, stop), values.narrow(2, 0, stop))
        out = scaled_dot_product(query, *seen, bias, False, scaling, softcap, self.eager)
        out = out.view(groups, key_heads, together, fold, -1).transpose(1, 2).reshape(groups * together, heads, -1)
        return out if self._slot_of_row is None else out.index_select(0, self._slot_of_row)

    def advance(self) -> None:
        """After a forward: the next tokens go behind these."""
        self.length += self.together

    def keep(self, alive: torch.Tensor) -> torch.Tensor:
        """Drops rows, alive (R,) False; returns the numbers of those that stay, in the order that they now have.

        Where groups have lost all rows, the last others take their place, so that few move.
        """
        kept = alive.nonzero().flatten()
        slots = self._slots[kept]
        living = torch.zeros(self.groups, dtype=torch.bool)
        living[slots // self.together] = True
        remaining = int(living.sum())
        if remaining < self.groups:
            holes = (~living[:remaining]).nonzero().flatten()
            movers = living[remaining:].nonzero().flatten() + remaining
            places = torch.arange(self.groups)
            places[movers] = holes
            slots = places[slots // self.together] * self.together + slots % self.together
            self._move(holes.to(self.device), movers.to(self.device), remaining)
        in_order = slots.argsort()
        self._slots = slots[in_order]
        self._find_rows()
        return kept[in_order]

    def _move(self, target: torch.Tensor, source: torch.Tensor, remaining: int) -> None:
        """Moves groups `source` into places `target`, then drops all from `remaining` on."""

        def moved(states: torch.Tensor) -> torch.Tensor:
            if len(target):
                states[target, :, : self.length] = states[source, :, : self.length]
            return states[:remaining]

        self.layers = [(moved(keys), moved(values)) for keys, values in self.layers]
        self.groups = remaining
        if self._seen is not None and len(self._seen) > 1:
            self._seen[target] = self._seen[source]
            self._seen = self._seen[:remaining]
            self._biases.clear()
