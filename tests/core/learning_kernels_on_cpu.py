"""The kernels of mask learning on a CPU, by Triton's interpreter.

A program of its own, because the interpreter has to be switched on before Triton is imported.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from learning_cases import check_batched, check_judgements, check_log, check_run, check_step

if __name__ == "__main__":
    cpu = torch.device("cpu")
    for seed in range(32):
        check_step(seed, cpu)
        check_log(seed, cpu)
    check_judgements(cpu)
    check_batched(cpu)
    check_batched(cpu, mask_decay=0.0)
    check_batched(cpu, pruned_grad_scale=1.0, mask_decay_cap=0.0)
    check_run(cpu, torch.float32)
    check_run(cpu, torch.float32, scale="none", mask_lr=1.0)
    check_run(cpu, torch.float32, optimizers=2)
    check_run(cpu, torch.bfloat16, pruned_grad_scale=0.25)
