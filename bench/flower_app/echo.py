"""An app of Flower whose server sends an array to the one node there is, and gets it back."""

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

server = ServerApp()
client = ClientApp()


@client.train()
def back(message: Message, _: Context) -> Message:
    return Message(content=message.content, reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Write the seconds of each exchange to a file, which appears when it is whole."""
    config = context.run_config
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.1)
    values = np.random.default_rng(0).standard_normal(int(config["values"]), dtype=np.float32)
    seconds = [exchange(grid, nodes[0], values + k) for k in range(int(config["exchanges"]))]
    out = Path(str(config["out"]))
    partial = out.with_suffix(".partial")
    partial.write_text(json.dumps(seconds))
    partial.rename(out)


def exchange(grid: Grid, node: int, sent: np.ndarray) -> float:
    begin = time.perf_counter()
    content = RecordDict({"values": ArrayRecord([sent])})
    (reply,) = grid.send_and_receive([Message(content=content, dst_node_id=node, message_type="train")])
    (came,) = reply.content["values"].to_numpy_ndarrays()
    seconds = time.perf_counter() - begin
    assert np.array_equal(came, sent)
    return seconds
