"""Exporters of a sparse network for other engines.

ONNX, torch.export and plain safetensors store zeros like other numbers. Core ML stores only nonzeros, Arm's compiler
for the Ethos-U encodes them, and TensorRT multiplies only half of the weights of a 2:4 layer. Zeros
are counted in the file, or in the weights that a compiler gets; where an engine for the file runs on this machine, its
outputs are compared with the model's.
"""

from gossamer.deployment.exports.coreml import to_coreml
from gossamer.deployment.exports.executorch import to_executorch
from gossamer.deployment.exports.onnx import to_onnx
from gossamer.deployment.exports.plain import to_dense, to_torch
from gossamer.deployment.exports.record import Comparison, Exported

__all__ = ["Comparison", "Exported", "to_coreml", "to_dense", "to_executorch", "to_onnx", "to_torch"]
