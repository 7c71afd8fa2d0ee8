"""What the packages of this environment need to run without a GPU. Python imports it at its start.

It acts when torchvision is imported, which SGLang does before it loads a model, so that processes that import neither
start as fast as ever.
"""

from __future__ import annotations

import sys

# The operators that torchvision's Python code refers to at import. Its wheel on PyPI is built for CUDA and cannot
# load its library beside a torch without; no text model calls them.
_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries = []  # A library's definitions live as long as it does.


def _declare_operators(torch) -> None:
    library = torch.library.Library("torchvision", "DEF")
    for operator in _OPERATORS:
        library.define(operator)
    _libraries.append(library)


def _leave_memory_unpinned(torch) -> None:
    """SGLang's LoRA layers pin memory whatever the device; torch refuses to without a GPU."""

    def unpinned(function):
        def call(*args, **kwargs):
            kwargs.pop("pin_memory", None)
            return function(*args, **kwargs)

        return call

    for name in ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self
    torch.cuda.cudart = lambda: _Cudart


class _Cudart:
    """The part of CUDA's runtime that pins memory: says that it did."""

    @staticmethod
    def cudaHostRegister(*_args) -> int:
        return 0


class _BeforeTorchvision:
    """A finder that finds nothing: it is asked before the module is loaded."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            _declare_operators(torch)
            _leave_memory_unpinned(torch)
        return


sys.meta_path.insert(0, _BeforeTorchvision())
