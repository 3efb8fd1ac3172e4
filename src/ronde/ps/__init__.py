"""Parameter servers: asynchronous training, or synchronous, with parameters that live on servers.

server = ronde.ps.ParameterServer(parameters, ronde.ps.SGD(lr=0.1), mode="bounded", staleness=4)
for indices in server.samples(len(data), batch_size):
    server.step(compute_gradients(server.parameters, data[indices]))
server.close()
"""

from ronde.ps.checkpoints import load_checkpoint
from ronde.ps.optimizers import LAMB, SGD, Adagrad, Adam, AdamW, GradientNoise, Optimizer, RMSProp
from ronde.ps.parameter_server import ParameterServer
from ronde.ps.tables.embedding_table import EmbeddingTable, NormalRows, UniformRows

__all__ = [
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "EmbeddingTable",
    "GradientNoise",
    "NormalRows",
    "Optimizer",
    "ParameterServer",
    "RMSProp",
    "UniformRows",
    "load_checkpoint",
]
