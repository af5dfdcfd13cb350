"""The native kernels as an extension that may fail; backend/build_with_kernels.py says how it is built."""

from setuptools import Extension, setup

KERNELS = Extension("gossamer.deployment.runtime.kernels", ["src/gossamer/deployment/runtime/kernels.c"], optional=True)

setup(ext_modules=[KERNELS])
