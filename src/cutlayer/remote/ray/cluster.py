"""The Ray cluster of a run: the one that is there already, or one of this machine alone, which ends with its last run.

A cluster that is started here listens on the loopback interface only. For one that other machines reach, start Ray on
them and name it in `RAY_ADDRESS`, or call `ray.init` before the run.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cutlayer.core.checks import reason
from cutlayer.errors import ConfigError

log = logging.getLogger("cutlayer")
LOOPBACK = "127.0.0.1"


class Cluster:
    """A connection to Ray that may be shared; whoever takes it gives it back."""

    def __init__(self) -> None:
        self._users = 0
        self._is_ours = False

    def take(self) -> Any:
        """The module `ray`, connected."""
        ray = _imported()
        if not ray.is_initialized():
            _connect(ray)
            self._users, self._is_ours = 0, True
        self._users += 1
        return ray

    def give_back(self) -> None:
        """Whoever was there before stays; what was started here ends with its last user."""
        self._users -= 1
        if self._is_ours and not self._users:
            self._is_ours = False
            _imported().shutdown()


CLUSTER = Cluster()
ATTEMPTS = 3


def _imported() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError("engine 'ray' needs ray, which is not installed; pip install 'cutlayer[ray]'") from None
    return ray


def _connect(ray: Any) -> None:
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    address = os.environ.get("RAY_ADDRESS")
    if address:
        log.info("engine ray: the cluster at %s", address)
        try:
            ray.init(address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(f"there is no Ray cluster at RAY_ADDRESS={address}: {reason(error)}") from error
        return
    start_local(ray, **quiet)
    if ray.util.get_node_ip_address() != LOOPBACK:
        ray.shutdown()
        raise ConfigError(
            "this version of Ray opens the local cluster to the network; start one as you want it with `ray start`, "
            "and set RAY_ADDRESS"
        )


def start_local(ray: Any, **options: Any) -> None:
    """A cluster of this machine alone. On a busy one a start may take longer than Ray waits, so it is tried again."""
    for left in reversed(range(ATTEMPTS)):
        try:
            with loopback_only():
                ray.init("local", include_dashboard=False, _node_ip_address=LOOPBACK, **options)
            return
        except Exception as error:  # Ray's own have no class that tells a slow start from others
            ray.shutdown()
            if not left:
                raise ConfigError(f"Ray cannot start a local cluster here: {reason(error)}") from error


@contextmanager
def loopback_only() -> Iterator[None]:
    """On Linux, Ray takes an address that other machines reach in place of 127.0.0.1, unless it is told not to."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
