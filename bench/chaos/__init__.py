"""Cost of a fault for the nodes that it does not hit. Real daemons run in one network namespace each. A seed chooses a
fault about every half minute, and an unknown peer misbehaves throughout.

Nodes are paced (`dilocox node --step-seconds`), so a restarted neighbour's computing does not look like a loss. A node
that loses nothing takes a known number of steps, measured before the first fault.

    schedule.py   the faults and their times, from a seed alone
    network.py    the network: namespaces, cuts, slow links
    clocks.py     a wall clock for each member, if libfaketime is installed
    world.py      the swarm on it; causes the scheduled faults, and repairs them
    stranger.py   idle streams, junk, a flood
    loss.py       the loss of other nodes: from the chain, and from the nodes' status of every second
"""
