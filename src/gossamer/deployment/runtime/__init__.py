"""A fast CPU runtime for sparse networks.

``deploy(model, example_input)`` returns a callable that runs the whole network in one native call if that is faster,
and otherwise the model itself; ``.explain()`` shows which and why, layer by layer.
"""

from gossamer.deployment.runtime.compiling import NoCompilerError
from gossamer.deployment.runtime.decoding import Decoder
from gossamer.deployment.runtime.deployed import Deployed, Explanation, compile_plan, deploy, torch_threads
from gossamer.deployment.runtime.native import load_native
from gossamer.deployment.runtime.native_model import NativeModel, Setting
from gossamer.deployment.runtime.network import UnsupportedError

__all__ = [
    "Decoder",
    "Deployed",
    "Explanation",
    "NativeModel",
    "NoCompilerError",
    "Setting",
    "UnsupportedError",
    "compile_plan",
    "deploy",
    "load_native",
    "torch_threads",
]
