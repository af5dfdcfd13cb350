"""Knowledge distillation: a student learns the output distribution of a teacher, not only the labels.

With a share a and a temperature T, the loss is (1-a)·L + a·T²·KL(teacher ‖ student). L is the loss on the labels, and
both distributions are softened: softmax(logits / T). The factor T² compensates for softening, which divides the
gradient by T². Reference: Hinton, Vinyals & Dean 2015, Distilling the Knowledge in a Neural Network.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def distil(loss: Tensor, student: Tensor, teacher: Tensor, *, share: float = 0.5, temperature: float = 4.0) -> Tensor:
    """The loss of a student that learns from the labels and from a teacher: (1-share)·loss + share·T²·KL.

    `loss` is the loss on the labels, averaged over the samples. `student` and `teacher` are logits for the same
    samples, with classes on the last axis. No gradient flows to the teacher.
    """
    if student.shape != teacher.shape:
        raise ValueError(
            f"expected logits of the same shape from student and teacher, got {tuple(student.shape)} and "
            f"{tuple(teacher.shape)}: give both the same batch and the same classes"
        )
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share: expected a number from 0 to 1, got {share}")
    if temperature <= 0.0:
        raise ValueError(f"temperature: expected a number above 0, got {temperature}")
    precise = torch.promote_types(
        student.dtype, torch.float32
    )  # softened distributions differ little: half precision is too coarse
    kl = divergence(student.to(precise), teacher.detach().to(precise), temperature).mean()
    return mixed(loss, kl, share)


def divergence(student: Tensor, teacher: Tensor, temperature: float | Tensor) -> Tensor:
    """T²·KL(teacher ‖ student) per sample, both softened by T; classes are the last axis.

    A tensor of temperatures must broadcast against the other axes.
    """
    softener = temperature[..., None] if isinstance(temperature, Tensor) else temperature
    log_teacher, log_student = F.log_softmax(teacher / softener, dim=-1), F.log_softmax(student / softener, dim=-1)
    return temperature**2 * (log_teacher.exp() * (log_teacher - log_student)).sum(-1)


def mixed(loss: Tensor, kl: Tensor, share: float | Tensor) -> Tensor:
    """The mean of both losses, weighted by the share of the teacher."""
    return (1.0 - share) * loss + share * kl
