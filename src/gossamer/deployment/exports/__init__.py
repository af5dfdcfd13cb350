"""Exporters of a sparse network for other engines.

ONNX, torch.export and plain safetensors store zeros like other numbers. Core ML stores only nonzeros, Arm's compiler
for the Ethos-U encodes them, and TensorRT multiplies only half of the weights of a 2:4 layer. Each exporter keeps every
zero of the model, and reads its file back before it returns; where an engine for it runs on this machine, random inputs
go through it.
"""

from gossamer.deployment.exports.coreml import to_coreml
from gossamer.deployment.exports.executorch import to_executorch
from gossamer.deployment.exports.onnx import to_onnx
from gossamer.deployment.exports.plain import to_dense, to_torch
from gossamer.deployment.exports.record import Comparison, Exported

__all__ = ["Comparison", "Exported", "to_coreml", "to_dense", "to_executorch", "to_onnx", "to_torch"]
