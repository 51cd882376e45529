"""Workers exchange tensors: a communicator over authenticated connections, usable without Spark.

Reading order: ``schedule`` and ``algorithms`` (pure), ``choice``, ``reduction``, ``wire``,
``authentication``, ``mesh``, ``rendezvous``, ``sink``, ``frame``, ``control``, ``tcp``, ``communicator``.
"""

from __future__ import annotations

from dl_on_spark.collectives.communicator import Communicator

__all__ = ["Communicator"]
