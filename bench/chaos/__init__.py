"""What does a fault cost those whom it does not hit? Real daemons, each in a network namespace of its own, a fault about every half
minute from a seed, and a stranger who misbehaves throughout.

Nodes are paced (`dilocox node --step-seconds`), so what a restarted neighbour computes is not taken for a loss, and a node that
loses nothing takes a known number of steps. What that number is, a faultless stretch before the first fault says.

    schedule.py   which fault when: from a seed, and nothing else
    network.py    the wire: namespaces, cuts, slow lines
    clocks.py     a wall clock for each member, where libfaketime is installed
    world.py      the swarm on it; does what the schedule says, and puts it right again
    stranger.py   idle streams, junk, a flood
    loss.py       what the others lost: from the chain, and from what the nodes said every second
"""
