"""Cost of a fault for the nodes that it does not hit. Real daemons run in one network namespace each. A seed chooses a
fault about every half minute, and an unknown peer misbehaves throughout.

Nodes are paced (`dilocox node --step-seconds`), so a restarted neighbour's computing does not look like a loss. A node
that loses nothing takes a known number of steps, measured before the first fault.

    schedule.py   which fault when: from a seed, and nothing else
    network.py    the wire: namespaces, cuts, slow lines
    clocks.py     a wall clock for each member, where libfaketime is installed
    world.py      the swarm on it; does what the schedule says, and puts it right again
    stranger.py   idle streams, junk, a flood
    loss.py       what the others lost: from the chain, and from what the nodes said every second
"""
