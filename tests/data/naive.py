"""A naive executor of chains of transforms: over lists, row by row. The tests' reference."""

from __future__ import annotations

import numpy as np

from dmesh.data import Dataset


def plain(elements):
    """Returns elements as Python objects."""
    return [_plain(element) for element in elements]


def _plain(element):
    if isinstance(element, dict):
        return {key: _plain(part) for key, part in element.items()}
    if isinstance(element, tuple):
        return tuple(map(_plain, element))
    return np.asarray(element).tolist()


def source(kind, length):
    """Returns a dataset, and a function that returns its elements in the n-th reading."""
    numbers = list(range(length))
    if kind == "dict":
        arrays = {"x": np.arange(length * 2).reshape(length, 2), "y": np.arange(length)}
        rows = [{"x": [2 * n, 2 * n + 1], "y": n} for n in numbers]
        return Dataset.from_tensor_slices(arrays), lambda reading: rows
    made = {
        "arrays": lambda: Dataset.from_tensor_slices(np.arange(length)),
        "range": lambda: Dataset.range(length),
        "generator": lambda: Dataset.from_generator(lambda: iter(numbers)),
    }[kind]()
    return made, lambda reading: numbers


def leaves(element):
    if isinstance(element, dict):
        return [leaf for part in element.values() for leaf in leaves(part)]
    if isinstance(element, tuple):
        return [leaf for part in element for leaf in leaves(part)]
    return [element]


def rows(element):
    """Returns the rows of an element."""
    if isinstance(element, dict):
        columns = [rows(part) for part in element.values()]
        return [dict(zip(element, row, strict=True)) for row in zip(*columns, strict=True)]
    if isinstance(element, tuple):
        return list(zip(*map(rows, element), strict=True))
    return list(element)


def stacked(elements):
    first = elements[0]
    if isinstance(first, dict):
        return {key: stacked([element[key] for element in elements]) for key in first}
    if isinstance(first, tuple):
        return tuple(stacked([element[index] for element in elements]) for index in range(len(first)))
    return list(elements)


def fits(step, dataset, elements):
    """Returns whether a transform can be applied to these elements."""
    found = elements(0)
    if step[0] in ("unbatch", "rebatch"):
        has_rows = all(isinstance(leaf, list) for element in found for leaf in leaves(element))
        return bool(found) and has_rows and all(len({len(leaf) for leaf in leaves(e)}) == 1 for e in found)
    if step[0] == "batch":
        return len({repr(_shape(element)) for element in found}) <= 1
    if step[0] == "concatenate":
        # A dataset that is read twice at once has two orders, which this executor does not follow.
        return bool(found) and "Shuffle" not in repr(dataset) and len({repr(_shape(e)) for e in found}) <= 1
    return True


def _shape(element):
    if isinstance(element, dict):
        return {key: _shape(part) for key, part in element.items()}
    if isinstance(element, tuple):
        return tuple(map(_shape, element))
    return np.shape(element)


def tripled(element):
    if isinstance(element, dict):
        return {key: tripled(part) for key, part in element.items()}
    if isinstance(element, tuple):
        return tuple(map(tripled, element))
    return element * 3 if not isinstance(element, list) else [tripled(item) for item in element]


def is_kept(element):
    return sum(int(np.sum(leaf)) for leaf in leaves(element)) % 3 != 1


def as_one(function):
    """Makes a function of one element of a tuple's items."""
    return lambda *items: function(items[0] if len(items) == 1 else items)


def apply(step, dataset, elements):
    """Returns a dataset with another transform, and the function that returns its elements."""
    kind, *arguments = step
    match kind:
        case "map":
            made = dataset.map(as_one(tripled), *arguments)
            return made, lambda reading: [tripled(element) for element in elements(reading)]
        case "filter":
            made = dataset.filter(as_one(lambda element: np.bool_(is_kept(element))))
            return made, lambda reading: [element for element in elements(reading) if is_kept(element)]
        case "shard":
            shards, index = arguments[0], arguments[1] % arguments[0]
            return dataset.shard(shards, index), lambda reading: elements(reading)[index::shards]
        case "take":
            [count] = arguments
            return dataset.take(count), lambda reading: elements(reading)[: None if count < 0 else count]
        case "skip":
            [count] = arguments
            return dataset.skip(count), lambda reading: [] if count < 0 else elements(reading)[count:]
        case "prefetch":
            return dataset.prefetch(*arguments), elements
        case "enumerate":
            [start] = arguments
            return dataset.enumerate(start), lambda reading: list(enumerate(elements(reading), start))
        case "unbatch":
            return dataset.unbatch(), lambda reading: [row for e in elements(reading) for row in rows(e)]
        case "batch":
            size, drop = arguments
            return dataset.batch(size, drop), lambda reading: _batched(elements(reading), size, drop)
        case "rebatch":
            [sizes] = arguments
            return dataset.rebatch(sizes), lambda reading: _rebatched(elements(reading), sizes)
        case "repeat":
            [count] = arguments
            return dataset.repeat(count), lambda reading: _repeated(elements, reading, count)
        case "concatenate":
            [count] = arguments
            other = dataset.take(count)
            return dataset.concatenate(other), lambda reading: elements(reading) + elements(reading)[:count]
    size, seed, reshuffle = arguments
    return dataset.shuffle(size, seed, reshuffle), _Shuffled(elements, size, seed, reshuffle)


def _batched(found, size, drop):
    pieces = [found[start : start + size] for start in range(0, len(found), size)]
    return [stacked(piece) for piece in pieces if len(piece) == size or not drop]


def _rebatched(found, sizes):
    every = [row for element in found for row in rows(element)]
    made, turn = [], 0
    while every or sizes[turn % len(sizes)] == 0:
        size = sizes[turn % len(sizes)]
        made.append(stacked(every[:size]) if size else _none(found[0]))
        every, turn = every[size:], turn + 1
    return made


def _none(element):
    if isinstance(element, dict):
        return {key: _none(part) for key, part in element.items()}
    if isinstance(element, tuple):
        return tuple(map(_none, element))
    return []


def _repeated(elements, reading, count):
    """The n-th repetition of the m-th reading is the reading (m, n) of all that is below."""
    made = []
    for repetition in range(count):
        path = (*reading, repetition) if isinstance(reading, tuple) else (reading, repetition)
        made += elements(path)
    return made


class _Shuffled:
    """A shuffle: one draw after the other, from a list."""

    def __init__(self, elements, size, seed, reshuffle):
        self.elements, self.size, self.seed, self.reshuffle = elements, size, seed, reshuffle

    def __call__(self, reading):
        path = reading if isinstance(reading, tuple) else (reading,)
        generator = np.random.default_rng([self.seed, 0, *(path if self.reshuffle else (0,))])
        found = self.elements(reading)
        buffer, made, draws = found[: self.size], [], []
        for element in found[self.size :]:
            if not draws:
                draws = generator.integers(self.size, size=1024).tolist()
            place = draws.pop(0)
            made.append(buffer[place])
            buffer[place] = element
        return made + [buffer[index] for index in generator.permutation(len(buffer)).tolist()]
