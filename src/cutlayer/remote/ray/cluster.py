"""The Ray cluster of a run: an existing one, or a local one that is started here and ends with its last run.

A cluster that is started here listens on the loopback interface only. For a cluster of several machines, start Ray on
them and set `RAY_ADDRESS`, or call `ray.init` before the run.
"""

import atexit
import logging
import os
from typing import Any

from cutlayer.core.checks import reason
from cutlayer.errors import ConfigError

log = logging.getLogger("cutlayer")
LOOPBACK = "127.0.0.1"


class Cluster:
    """A connection to Ray that runs share; each run takes it and gives it back."""

    def __init__(self) -> None:
        self._users = 0
        self._is_ours = False

    def take(self) -> Any:
        """Return the module `ray`, connected to a cluster."""
        ray = _imported()
        if not ray.is_initialized():
            _connect(ray)
            self._users, self._is_ours = 0, True
            atexit.register(self._leave_to_ray)  # runs before Ray's own hook, which was registered earlier
        self._users += 1
        return ray

    def give_back(self) -> None:
        """Shut the connection down after its last user, if it was opened here."""
        self._users -= 1
        if self._is_ours and not self._users:
            self._is_ours = False
            _imported().shutdown()

    def _leave_to_ray(self) -> None:
        """Let Ray shut itself down when Python exits: a run that is collected meanwhile must not do it again."""
        self._is_ours = False


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
    """Start a cluster on this machine; retry, as on a busy machine a start may take longer than Ray waits."""
    constants = ray._private.ray_constants
    for left in reversed(range(ATTEMPTS)):
        before = constants.ENABLE_RAY_CLUSTER
        constants.ENABLE_RAY_CLUSTER = False  # or Ray replaces 127.0.0.1 by an address that other machines reach
        try:
            ray.init("local", include_dashboard=False, _node_ip_address=LOOPBACK, **options)
            return
        except Exception as error:  # Ray has no exception class of its own for a slow start
            ray.shutdown()
            if not left:
                raise ConfigError(f"Ray cannot start a local cluster here: {reason(error)}") from error
        finally:
            constants.ENABLE_RAY_CLUSTER = before
