"""SCL and its rivals behind one protocol, one file each, so that they can be compared.

`gossamer.Sparsifier` drives any of them with any model and optimizer; `gossamer.lab.batched` trains many runs of many
methods at once. docs/methods.md has a card for each method and shows how to write your own.
"""

from gossamer.methods.acdc import ACDC
from gossamer.methods.apoz import APoZ
from gossamer.methods.autoprune import AutoPrune
from gossamer.methods.base import (
    Context,
    Layout,
    Method,
    Options,
    Outcome,
    PrunedAtZero,
    Request,
    Series,
    Step,
    Timeline,
    expect,
)
from gossamer.methods.budgets import Budget, BudgetedMethod, GlobalBudget, GlobalThreshold, keep_largest_, magnitude
from gossamer.methods.dense import Dense
from gossamer.methods.dpf import DPF
from gossamer.methods.elsa import ELSA
from gossamer.methods.feather import Feather
from gossamer.methods.geometric_median import FPGM
from gossamer.methods.gradual import Gradual
from gossamer.methods.gradual_per_layer import GradualPerLayer
from gossamer.methods.granet import GraNet
from gossamer.methods.group_lasso import SSL
from gossamer.methods.hyperflux import Hyperflux
from gossamer.methods.l0 import L0
from gossamer.methods.l1_filter import L1Filter
from gossamer.methods.lottery import Lottery
from gossamer.methods.movement import Movement
from gossamer.methods.narang import Narang
from gossamer.methods.noise import uniform
from gossamer.methods.one_shot import OneShot
from gossamer.methods.patterned import PatternBudget, make_budget
from gossamer.methods.platon import PLATON
from gossamer.methods.proximal import Proximal
from gossamer.methods.registry import ALIASES, METHODS, find, known, load, make_options, register
from gossamer.methods.rigl import RigL
from gossamer.methods.scaling_factors import DSS
from gossamer.methods.scl import SCL
from gossamer.methods.scp import SCP
from gossamer.methods.slimming import Slimming
from gossamer.methods.snip import SNIP
from gossamer.methods.soft_filter import SoftFilter
from gossamer.methods.soft_movement import SoftMovement
from gossamer.methods.soft_threshold import STR
from gossamer.methods.spred import Spred
from gossamer.methods.sr_ste import SRSTE
from gossamer.methods.surgery import Surgery
from gossamer.methods.timing import PrunedInStages, PrunedOnce
from gossamer.methods.variational_dropout import SparseVD

__all__ = [
    "ALIASES",
    "METHODS",
    "Budget",
    "BudgetedMethod",
    "Context",
    "GlobalBudget",
    "GlobalThreshold",
    "Layout",
    "Method",
    "Options",
    "Outcome",
    "PatternBudget",
    "PrunedAtZero",
    "PrunedInStages",
    "PrunedOnce",
    "Request",
    "Series",
    "Step",
    "Timeline",
    "expect",
    "find",
    "keep_largest_",
    "known",
    "load",
    "magnitude",
    "make_budget",
    "make_options",
    "register",
    "uniform",
]

# In the order of the tables.
for _method in (
    Dense,
    SCL,
    DPF,
    Gradual,
    GradualPerLayer,
    OneShot,
    Narang,
    Surgery,
    Lottery,
    SNIP,
    RigL,
    STR,
    L0,
    AutoPrune,
    Hyperflux,
    Feather,
    Proximal,
    Movement,
    SoftMovement,
    ACDC,
    GraNet,
    PLATON,
    ELSA,
    Spred,
    SRSTE,
    SparseVD,
    SoftFilter,
    FPGM,
    L1Filter,
    SSL,
    Slimming,
    DSS,
    SCP,
    APoZ,
):
    register(_method)
