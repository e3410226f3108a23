"""The same work under torchrun, its peers and tmrun, with the same faults, in one run: ``python -m bench.compare --help``.

``plan`` says what is run, ``systems`` how each system is launched, ``trial`` runs one, ``measure`` turns step records into figures,
``report`` and ``plots`` turn rows into tables and pictures. ``train`` holds what runs inside the workers.
"""
