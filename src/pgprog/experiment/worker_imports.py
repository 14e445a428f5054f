"""What a worker of a comparison needs, imported once by the server that workers are forked from."""

import importlib

from pgprog.imports import own_process, without_collection

own_process()
with without_collection():
    for _name in ("tyro", "pgprog.experiment.loop", "pgprog.experiment.gradients"):
        importlib.import_module(_name)
