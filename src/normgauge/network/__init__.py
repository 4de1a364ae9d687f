"""A model read once: its calls in order, who writes what a normalizer reads, roles of parameters, copies, float64."""

from normgauge.network._arithmetic import KeepDouble as KeepDouble
from normgauge.network._arithmetic import WithoutEps as WithoutEps
from normgauge.network._arithmetic import without_eps as without_eps
from normgauge.network._call_order import Graph as Graph
from normgauge.network._call_order import Made as Made
from normgauge.network._call_order import ModuleCall as ModuleCall
from normgauge.network._call_order import Operations as Operations
from normgauge.network._call_order import Recorder as Recorder
from normgauge.network._call_order import Step as Step
from normgauge.network._call_order import first_tensor as first_tensor
from normgauge.network._call_order import replaced as replaced
from normgauge.network._call_order import watched as watched
from normgauge.network._modules import activation_name as activation_name
from normgauge.network._modules import convolves as convolves
from normgauge.network._modules import copy_model as copy_model
from normgauge.network._modules import exchange as exchange
from normgauge.network._modules import fix_parametrizations as fix_parametrizations
from normgauge.network._modules import is_leaf as is_leaf
from normgauge.network._modules import owner_of as owner_of
from normgauge.network._modules import role_of as role_of
from normgauge.network._network import Edge as Edge
from normgauge.network._network import Network as Network
from normgauge.network._roles import Role as Role
from normgauge.network.fold import fold_channels as fold_channels
from normgauge.network.fold import folded_affine as folded_affine
from normgauge.network.fold import stored_affine as stored_affine
