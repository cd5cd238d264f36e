"""What `lockstep` has for everyone, and what type checkers and editors see of it."""

import models as models
from pipeline import __version__ as __version__
from pipeline.errors import LockstepError as LockstepError
from pipeline.optim.adamw import adamw as adamw
from pipeline.optim.compressed.ada_distro import ada_distro as ada_distro
from pipeline.optim.compressed.compressor import Compressor as Compressor
from pipeline.optim.compressed.demo import demo as demo
from pipeline.optim.compressed.distro import CompressedMomentum as CompressedMomentum
from pipeline.optim.compressed.distro import distro as distro
from pipeline.optim.dense import dense as dense
from pipeline.optim.local.diloco import diloco as diloco
from pipeline.optim.local.diloco import outer_sgd as outer_sgd
from pipeline.optim.local.fedavg import fedavg as fedavg
from pipeline.optim.local.local_steps import local_steps as local_steps
from pipeline.optim.local.sparseloco import sparseloco as sparseloco
from pipeline.optim.local.sparta import sparta as sparta
from pipeline.optim.local.sparta_diloco import sparta_diloco as sparta_diloco
from pipeline.optim.local.streaming import streaming_diloco as streaming_diloco
from pipeline.optim.muon import muon as muon
from pipeline.optim.optimizer import Optimizer as Optimizer
from pipeline.optim.quantize.half import Half as Half
from pipeline.optim.quantize.integers import Integers as Integers
from pipeline.optim.quantize.levels import Levels as Levels
from pipeline.optim.quantize.qsgd import QSGD as QSGD
from pipeline.optim.quantize.quantized import quantized as quantized
from pipeline.optim.sgd import sgd as sgd
from pipeline.optim.step_direction import StepDirection as StepDirection
from pipeline.optim.transform import OptimizerState as OptimizerState
from pipeline.optim.transform import all_gather as all_gather
from pipeline.optim.transform import alone as alone
from pipeline.optim.transform import as_transform as as_transform
from pipeline.optim.transform import lookahead_params as lookahead_params
from pipeline.simulation.result import Result as Result
from pipeline.simulation.simulate import simulate as simulate
