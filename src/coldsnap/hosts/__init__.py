"""How to run a step on hosts and wait for all of them. One host is a list of one."""

from coldsnap.hosts.base import Host, Placement
from coldsnap.hosts.gather import together
from coldsnap.hosts.local import LocalHost

__all__ = ["Host", "LocalHost", "Placement", "together"]
