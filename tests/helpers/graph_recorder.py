"""A stand-in for the graphs of ``torch.cuda`` on a CPU: it repeats operations, not Python.

While a graph is captured, each operation is noted with the tensors that it reads and writes. A
replay performs the same operations on the same memory. So whatever Python would have decided anew
(a number, a shape, a new tensor) stays as it was, as with a CUDA graph, and asking for a tensor's
value during the capture is an error, as it is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ASKS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select")


class _Noting(TorchDispatchMode):
    def __init__(self, operations: list[Any]) -> None:
        super().__init__()
        self.operations = operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0] in _ASKS:
            raise RuntimeError(f"{func}: operation not permitted when stream is capturing")
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        return out


def _memory(tree: Any) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in tree_leaves(tree) if torch.is_tensor(x)}


class Graph:
    def __init__(self, events: list[str]) -> None:
        self.operations: list[Any] = []
        self._events = events

    @torch.no_grad()
    def replay(self) -> None:
        self._events.append("replay")
        for func, args, kwargs, out in self.operations:
            again = func(*args, **kwargs)
            given = _memory((args, kwargs))
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                # What is a view of an argument, or the argument itself, is up to date.
                if torch.is_tensor(old) and old.untyped_storage().data_ptr() not in given:
                    assert old.shape == new.shape
                    old.copy_(new)


class Stream:
    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self._events = name, events

    def wait_stream(self, other: Stream) -> None:
        self._events.append(f"{self.name} waits for {other.name}")


class Cuda:
    """What of ``torch.cuda`` a capture needs.

    Attributes:
        events: What happened, in order.
        graphs: The graphs.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self.graphs: list[Graph] = []
        self.Stream = lambda: Stream("side", self.events)
        self.CUDAGraph = self._new_graph

    def current_stream(self) -> Stream:
        return Stream("main", self.events)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.events.append(f"on {stream.name}")
        yield
        self.events.append(f"off {stream.name}")

    def _new_graph(self) -> Graph:
        self.graphs.append(Graph(self.events))
        return self.graphs[-1]

    @contextlib.contextmanager
    def graph(self, graph: Graph) -> Iterator[None]:
        self.events.append("capture")
        with _Noting(graph.operations):
            yield
