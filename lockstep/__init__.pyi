"""What `lockstep` has for everyone, and what type checkers and editors see of it."""

import models as models
from lockstep.errors import LockstepError as LockstepError
from lockstep.optim.compressed.compressor import Compressor as Compressor
from lockstep.optim.compressed.distro import CompressedMomentum as CompressedMomentum
from lockstep.optim.compressed.distro import demo as demo
from lockstep.optim.compressed.distro import distro as distro
from lockstep.optim.dense import adamw as adamw
from lockstep.optim.dense import dense as dense
from lockstep.optim.dense import from_optax as from_optax
from lockstep.optim.dense import muon as muon
from lockstep.optim.dense import sgd as sgd
from lockstep.optim.local.local_steps import diloco as diloco
from lockstep.optim.local.local_steps import fedavg as fedavg
from lockstep.optim.local.local_steps import local_steps as local_steps
from lockstep.optim.local.local_steps import outer_sgd as outer_sgd
from lockstep.optim.local.outer_steps import cgad as cgad
from lockstep.optim.local.outer_steps import delayed_nesterov as delayed_nesterov
from lockstep.optim.local.outer_steps import heloco as heloco
from lockstep.optim.local.sparseloco import sparseloco as sparseloco
from lockstep.optim.local.sparta import sparta as sparta
from lockstep.optim.local.sparta import sparta_diloco as sparta_diloco
from lockstep.optim.local.streaming import decoupled_diloco as decoupled_diloco
from lockstep.optim.local.streaming import streaming_diloco as streaming_diloco
from lockstep.optim.optimizer import Optimizer as Optimizer
from lockstep.optim.quantize import QSGD as QSGD
from lockstep.optim.quantize import Half as Half
from lockstep.optim.quantize import Integers as Integers
from lockstep.optim.quantize import Levels as Levels
from lockstep.optim.quantize import quantized as quantized
from lockstep.optim.transform import OptimizerState as OptimizerState
from lockstep.optim.transform import all_gather as all_gather
from lockstep.optim.transform import alone as alone
from lockstep.optim.transform import as_transform as as_transform
from lockstep.optim.transform import lookahead_params as lookahead_params
from lockstep.simulation.result import Result as Result
from lockstep.simulation.simulate import simulate as simulate

__version__: str
