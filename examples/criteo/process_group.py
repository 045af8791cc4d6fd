"""How the ranks of train.py find each other."""

import json
import os
import socket
import time
import uuid

import torch.distributed as dist

_ADDRESS_KEY = "train.py/store"
_TIMEOUT_SECONDS = 300
_RETRY_SECONDS = 0.05


def init_process_group() -> None:
    """Joins the ranks that torchrun started; without torchrun this process is the only one."""
    if "RANK" not in os.environ:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", store=_new_store(rank), rank=rank, world_size=world_size)
    else:
        dist.init_process_group("gloo")


def _new_store(rank: int) -> dist.Store:
    """Returns a store that rank 0 serves, and no rank of an earlier attempt has written to.

    torchrun's agent gives every attempt the same store, in which ranks that were restarted find the
    addresses of their dead predecessors (pytorch/pytorch#135712). It serves here only to publish
    rank 0's: a dead one's refuses the connection, or does not know its token.
    """
    host = os.environ["MASTER_ADDR"]
    agent = dist.TCPStore(host, int(os.environ["MASTER_PORT"]), is_master=False)
    if rank == 0:
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        token = uuid.uuid4().hex
        store.set(token, "")
        agent.set(_ADDRESS_KEY, json.dumps([store.port, token]))
        return store
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        port, token = json.loads(agent.get(_ADDRESS_KEY))
        if _answers(host, port):
            store = dist.TCPStore(host, port, is_master=False)
            if store.check([token]):
                return store
        time.sleep(_RETRY_SECONDS)
    raise TimeoutError(f"rank 0 must say where its store is within {_TIMEOUT_SECONDS} s")


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_TIMEOUT_SECONDS).close()
    except OSError:
        return False
    return True
