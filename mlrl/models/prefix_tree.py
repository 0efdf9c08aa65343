"""Prefix trees of token segments, packed so that every shared prefix is run once.

Responses to one prompt share that prompt, and in a multi-turn tree the prompts of a turn may extend what was said
before. A `PrefixTree` holds each distinct stretch of tokens once; `pack` cuts off what different prompts begin with
(the words of a chat template), and lays everything out on a single token axis (no padding anywhere in the linear
layers) together with the attention plan that lets a segment see exactly its ancestors and itself. The result equals
running every sequence on its own, in value and in gradient.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from mlrl.models.attention import SegmentGroup, TreeAttention
from mlrl.models.beginnings import LEAST_TOKENS, common_beginnings
from mlrl.models.prefix_cache import Known, KnownStates, PrefixCache


@dataclass
class Segment:
    """A stretch of tokens that follows `parent` (None at the start of a sequence).

    Segments of different `weights` are run through different ones, so they have no beginning in common.

    Attributes:
        known: where its keys and values are in a cache, so that it is not run.
    """

    token_ids: list[int]
    parent: int | None
    depth: int
    scored: bool
    weights: Hashable = None
    has_children: bool = False
    known: Known | None = None


@dataclass
class PackedTree:
    """A prefix tree laid out on one token axis of length T.

    Attributes:
        input_ids: (1, T) tokens; position_ids: (1, T) positions of each token within its own sequence.
        attention: which tokens attend to which, passed through the model to the attention function.
        predecessors: (S,) packed position whose hidden state predicts each scored token, segment after segment in
            the order of their numbers. targets: (S,) those tokens. lengths: tokens a scored segment.
        paths: for each segment of the tree the places, among all keys, of all tokens from the start of its sequence to
            its end; without the last token of a scored segment that ends a branch, which is not run. They are packed
            positions, behind `num_known` places of tokens that a cache knows.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention: TreeAttention
    predecessors: torch.Tensor
    targets: torch.Tensor
    lengths: list[int]
    paths: list[list[int]]
    num_known: int = 0


@dataclass
class PrefixTree:
    """Distinct segments of a set of sequences; equal prompts under one parent are held once.

    Attributes:
        num_tokens: tokens that a forward over this tree runs at most; fewer where prompts begin alike.
    """

    segments: list[Segment] = field(default_factory=list)
    num_tokens: int = field(default=0, init=False)
    _index: dict[Hashable, int] = field(default_factory=dict)

    def add(
        self,
        token_ids: Sequence[int],
        parent: int | None = None,
        scored: bool = False,
        key: Hashable = None,
        weights: Hashable = None,
    ) -> int:
        """Adds a segment and returns its number; a segment met before (same parent, weights and key) is reused.

        `key` tells segments apart; without one, equal tokens under one parent are the same segment. A response is
        given a key of its own, since two equal responses are two samples. `weights` names what runs the segment.
        """
        identity = (parent, tuple(token_ids) if key is None else key, weights)
        if identity in self._index:
            number = self._index[identity]
            before = _run_length(self.segments[number])
            self.segments[number].scored |= scored
            self.num_tokens += _run_length(self.segments[number]) - before
            return number
        if parent is None and not token_ids:
            raise ValueError("a sequence needs at least one token before its first response")
        depth = 0 if parent is None else self.segments[parent].depth + 1
        self.segments.append(Segment(list(token_ids), parent, depth, scored, weights))
        self.num_tokens += _run_length(self.segments[-1])
        if parent is not None:
            before = _run_length(self.segments[parent])
            self.segments[parent].has_children = True
            self.num_tokens += _run_length(self.segments[parent]) - before
        self._index[identity] = len(self.segments) - 1
        return self._index[identity]

    def add_chain(self, chain: Sequence[tuple[Sequence[int], Hashable]]) -> int:
        """Adds (tokens, key) segments, each following the one before; the last is scored. Returns its number."""
        parent = None
        for place, (token_ids, key) in enumerate(chain):
            parent = self.add(token_ids, parent, scored=place == len(chain) - 1, key=key)
        return parent

    def cost(self, chain: Sequence[tuple[Sequence[int], Hashable]]) -> int:
        """Tokens that adding this chain would add at most."""
        parent, cost = None, 0
        for token_ids, key in chain:
            known = self._index.get((parent, tuple(token_ids) if key is None else key, None)) if cost == 0 else None
            cost += 0 if known is not None else len(token_ids)
            parent = known
        return cost

    def pack(self, device: torch.device | str = "cpu", cache: PrefixCache | None = None) -> PackedTree:
        """Lays the tree out for one forward; scored segments keep the order of their numbers.

        What the `cache` knows of how a sequence begins is left out, but for the last token of a first segment, whose
        hidden state may be asked for.
        """
        segments, last_pieces = _cut_beginnings(self.segments, cache)
        starts, stops, offsets = _layout(segments)
        input_ids = [t for s in segments for t in s.token_ids[: _run_length(s)]]
        position_ids = [p for s, o in zip(segments, offsets, strict=True) for p in range(o, o + _run_length(s))]
        predecessors, targets, lengths = [], [], []
        for number, segment in enumerate(segments):
            if segment.scored:
                before = _last_position_before(segments, stops, starts, segment.parent)
                predecessors += [before, *range(starts[number], starts[number] + len(segment.token_ids) - 1)][
                    : len(segment.token_ids)
                ]
                targets += segment.token_ids
                lengths.append(len(segment.token_ids))
        known = KnownStates(cache, device) if any(s.known for s in segments) else None
        paths = _paths(segments, starts, stops, known)
        groups = _groups(segments, paths, starts, stops, device)
        return PackedTree(
            input_ids=torch.tensor([input_ids], device=device),
            position_ids=torch.tensor([position_ids], device=device),
            attention=TreeAttention(groups, len(input_ids), device, known=known),
            predecessors=torch.tensor(predecessors, dtype=torch.long, device=device),
            targets=torch.tensor(targets, dtype=torch.long, device=device),
            lengths=lengths,
            paths=[paths[piece] for piece in last_pieces],
            num_known=0 if known is None else known.length,
        )


def _cut_beginnings(segments: list[Segment], cache: PrefixCache | None) -> tuple[list[Segment], list[int]]:
    """The same sequences in a tree in which siblings that begin alike share that beginning as their parent.

    Scored segments stay whole, and in order. Returns the new segments, and the last one of each old segment.
    """
    siblings: dict[Hashable, list[tuple[int, ...]]] = {}
    for segment in segments:
        if not segment.scored:
            siblings.setdefault((segment.parent, segment.weights), []).append(tuple(segment.token_ids))
    cuts = {family: common_beginnings(members) for family, members in siblings.items()}
    pieces: list[Segment] = []
    last_pieces: list[int] = []
    known: dict[Hashable, int] = {}  # the unscored piece of these tokens under a parent
    for segment in segments:
        whole = tuple(segment.token_ids)
        own = [whole] if segment.scored else cuts[segment.parent, segment.weights][whole] or [whole]
        parent = None if segment.parent is None else last_pieces[segment.parent]
        found = None if cache is None or parent is not None or segment.scored else _known_of(segment, cache)
        for token_ids, part in _cut_known(own, found):
            identity = (parent, segment.weights, token_ids, part is None)
            if not segment.scored and identity in known:
                parent = known[identity]
                continue
            depth = 0 if parent is None else pieces[parent].depth + 1
            pieces.append(replace(segment, token_ids=list(token_ids), parent=parent, depth=depth, known=part))
            parent = len(pieces) - 1
            if not segment.scored:  # a scored one that ends a branch is not run to its end
                known[identity] = parent
        last_pieces.append(parent)
    return pieces, last_pieces


def _known_of(segment: Segment, cache: PrefixCache) -> Known | None:
    """What of a first segment need not be run; too little of it is not worth a piece of its own."""
    found = cache.find(segment.weights, tuple(segment.token_ids))
    if found is None:
        return None
    positions = found.positions[: len(segment.token_ids) - 1]
    return replace(found, positions=positions) if len(positions) >= LEAST_TOKENS else None


def _cut_known(pieces: list[tuple[int, ...]], found: Known | None) -> Iterator[tuple[tuple[int, ...], Known | None]]:
    """The pieces of a sequence, cut where its known beginning ends; each with where it is known."""
    start, end = 0, 0 if found is None else len(found.positions)
    for piece in pieces:
        inside = min(max(end - start, 0), len(piece))
        if inside:
            yield piece[:inside], replace(found, positions=found.positions[start : start + inside])
        if inside < len(piece):
            yield piece[inside:], None
        start += len(piece)


def _run_length(segment: Segment) -> int:
    """Tokens of a segment that are run: none that are known, and nothing is predicted from the last token of a response
    that ends a branch."""
    if segment.known is not None:
        return 0
    return len(segment.token_ids) - (1 if segment.scored and not segment.has_children else 0)


def _layout(segments: list[Segment]) -> tuple[list[int], list[int], list[int]]:
    """Packed start and stop of every segment, and the position (in its sequence) of its first token."""
    starts, stops, offsets, total = [], [], [], 0
    for segment in segments:
        starts.append(total)
        total += _run_length(segment)
        stops.append(total)
        parent = segment.parent
        offsets.append(0 if parent is None else offsets[parent] + len(segments[parent].token_ids))
    return starts, stops, offsets


def _last_position_before(segments: list[Segment], stops: list[int], starts: list[int], parent: int | None) -> int:
    """Packed position of the last token before a segment: its nearest ancestor that has tokens."""
    while parent is not None and stops[parent] == starts[parent]:
        parent = segments[parent].parent
    if parent is None:
        raise ValueError("a scored segment needs a token before it")
    return stops[parent] - 1


def _paths(segments: list[Segment], starts: list[int], stops: list[int], known: KnownStates | None) -> list[list[int]]:
    """Places of the keys of each segment's ancestors and of itself; the known ones are given theirs."""
    places = [known.take(s.known.block, s.known.positions) if s.known is not None else None for s in segments]
    num_known = 0 if known is None else known.length
    paths: list[list[int]] = []
    for segment, start, stop, own in zip(segments, starts, stops, places, strict=True):
        own = range(num_known + start, num_known + stop) if own is None else own
        paths.append([*([] if segment.parent is None else paths[segment.parent]), *own])
    return paths


def _groups(
    segments: list[Segment], paths: list[list[int]], starts: list[int], stops: list[int], device
) -> list[SegmentGroup]:
    """Segments that are attended together: same depth, similar lengths, so that little padding is computed."""
    by_depth: dict[int, list[int]] = {}
    for number, segment in enumerate(segments):
        if stops[number] > starts[number]:
            by_depth.setdefault(segment.depth, []).append(number)
    groups = []
    for depth in sorted(by_depth):
        members = sorted(by_depth[depth], key=lambda n: (stops[n] - starts[n], len(paths[n])))
        for bucket in _buckets(members, [stops[n] - starts[n] for n in members], [len(paths[n]) for n in members]):
            groups.append(SegmentGroup.build([(starts[n], stops[n], paths[n]) for n in bucket], device))
    return groups


def _buckets(
    members: list[int], query_lengths: list[int], key_lengths: list[int], waste: float = 1.5
) -> list[list[int]]:
    """Cuts members (sorted by length) into runs whose padded attention area stays below `waste` times the real one."""
    buckets: list[list[int]] = []
    current: list[int] = []
    area = longest_key = 0
    for member, queries, keys in zip(members, query_lengths, key_lengths, strict=True):
        longest = max(longest_key, keys)
        real = area + queries * keys
        if current and queries * longest * (len(current) + 1) > waste * real + 4096:
            buckets.append(current)
            current, real, longest = [], queries * keys, keys
        current.append(member)
        area, longest_key = real, longest
    return [*buckets, current] if current else buckets
