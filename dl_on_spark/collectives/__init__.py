"""Workers exchange tensors, in shared memory and over authenticated connections; usable without Spark.

Reading order: ``schedule`` and ``algorithms`` (pure), ``choice``, ``reduction``, ``wire``,
``authentication``, ``mesh``, ``rendezvous``, ``sink``, ``frame``, ``control``, ``tcp``, ``scheduled``, ``slot``,
``shared``, ``host``, ``hierarchical``, ``requests``, ``communicator``.
"""

from __future__ import annotations

from dl_on_spark.collectives.communicator import Communicator

__all__ = ["Communicator"]
