"""Every tuned number of the search, with what chose it.

"Measured" names the benchmark whose table a change must not make worse; the commands are in ``benchmarks/``. Where it
says "taken", no measurement chose the number: nearby values do as well. None of these is compiled in, so changing one
compiles nothing anew.
"""

from __future__ import annotations

from typing import Final

# ---- moves

MOVES: Final = {
    "redraw": 2.0, "copy": 3.0, "group": 4.0, "repeated": 2.0, "swap": 0.5, "shard": 0.5, "span": 2.0, "split": 0.5,
}  # fmt: skip
"""Moves with their relative frequencies, in the order of their numbers in ``moves``. Measured: search_quality,
networks, when ``span`` came; ``split`` was taken to be as rare as the other moves of devices."""
TWICE: Final = 0.15
"""How often two classes change at once, one making room for the other. Measured: search_quality, networks (NMT)."""
EXCHANGED: Final = 0.1
"""How often two classes of one shape exchange their configs, where there are two. Not measured alone."""
BESIDE: Final = 0.05
"""How often classes of one shape get the same config side by side, where there are several. Measured: 10 s of processor
time, means of four to six seeds without, with 0.04, 0.1 and 0.25, ms: language model on 4 P100 64.3, 62.2, 62.2, 62.2,
on 8 36.8, 36.3, 35.8, 37.4; NMT on 4 53.7, 50.7, 51.2, 50.2, on 8 39.1, 38.2, 38.3, 37.5, on 16 31.5, 31.8, 32.3, 34.0,
on 64 30.5, 30.8, 32.8, 30.9. With 0.05, three seeds or six: 62.3, 35.9; 50.5, 39.6, 32.6, 30.7."""
ALTERNATE: Final = 0.25
"""How often only every second or third member of a class changes. Measured: search_quality, alternating."""
BOTH: Final = 0.6
"""How often, then, the other members change too, to another config. Measured: search_quality, alternating."""
STEPS_TOGETHER_FROM: Final = 32
"""From so many devices on, steps of a recurrent layer do not alternate. Measured: NMT on 16 P100 (20 s, six seeds) has
a median of 32.9 ms where they do and 37.6 where they do not; medians on 4 and 8 are the same within 2 %; on 64, where
chains have fewer proposals for each choice, two seeds are 7 and 20 % slower with it, and the language model 15 %."""
PERMUTED: Final = 0.3
"""How often a random config lies on devices in an order that permutes the axes of the machine, where it has several.
Measured: search_quality, alternating."""

# ---- candidates

CANDIDATES: Final = 48
"""Configs of each operator that a chain draws from. A quarter of them split samples only and a quarter one axis at
most, so that a search soon meets good ones. Measured: search_quality, networks: more candidates cost more templates."""
SETS, RENEWED = 3, 12
"""Chains use so many sets of candidates in turn, so that templates are reused; after so many chains come new sets.
Measured: as CANDIDATES."""
COARSE_CANDIDATES: Final = 4000
"""Configs that a coarse chain draws from, of all classes together. Three quarters are simple ones, because a chain that
moves layers between blocks of devices needs each layer on each block. Measured: search_quality, networks (NMT)."""
MOST_OF_CLASS: Final = 480
"""Most of these for one class. Taken."""
FEW: Final = 8
"""Up to this many devices, numbers of devices that do not divide them evenly are drawn twice as often: there are few,
and the best plan may need them. Measured: search_quality, local and exhaustive."""

# ---- temperature and patience of chains

EXCESS: Final = (0.3, 0.1, 0.03, 0.01, 0.003, 0.0005)
"""The temperatures of a chain, in order: by what share a plan may typically be slower than the best. Each of the N
operators that can be changed alone adds about 1 / beta to the cost (equipartition), so beta = N / excess, whatever the
model's size and speed. Measured: search_quality, networks: hotter beginnings lose good starts."""
COARSE_EXCESS: Final = (0.5, 0.15, 0.05, 0.015, 0.005)
"""The same for coarse chains, where N is the number of classes."""
FIRST: Final = (1, 0, 2)
"""Where in ``EXCESS`` chains begin, in turn: a temperature that is right for a bad start would lose a good one. Taken:
any turn that holds all three."""
WORTH: Final = 1e-3
"""Share of the time that a chain must gain to go on: small gains are left to polishing, which is quicker at them.
Measured: search_quality, networks, seeds that end in a local optimum."""
PATIENCE: Final = (3000, 8, 6000)
"""Proposals without a gain that end a chain: at least, for each leader, at most. Measured: as WORTH."""
COARSE_PATIENCE: Final = (1200, 1200, 2400, 2400, 3600)
"""The same of coarse chains by number of the climb: early climbs get short ones, to suit short budgets. Also the most
proposals of the descent over classes that follows them. Measured: search_quality, networks, 1 s against 60 s."""
COARSE_CHAINS: Final = 5
"""Most coarse chains of a climb. Taken."""
GAIN: Final = 0.01
"""A coarse chain that gains less than this share of the time is the climb's last. Taken: what a prediction errs by is
more."""
PENALTY: Final = 30.0
"""A plan that needs twice the memory of one device counts as 31 times as slow. Taken: any number that makes what does
not fit worse than what does, without making them incomparable."""

# ---- climbs

WINDOW: Final = 8
"""Climb n starts when climb n - WINDOW and all before it have ended: it goes on from what those have found. So at most
this many run at once. Taken: more would keep more cores busy, and know less when they start."""
FROM_BEST: Final = 2
"""From this climb on, every second one starts from the best plan that is known. Measured: 20 s of processor time, one
process, seeds 0 to 2, where it was 8: Inception-v3 on 16 P100 has 44.4, 45.7, 45.2 ms instead of 45.0, 45.9, 45.4;
ResNet-101 is within 0.3 % on 16, NMT on 16 within what its seeds differ by. From climb 1 on, NMT was worse there."""
POLISH: Final = 0.3
"""Share of a budget that is left for polishing the best plan. With a budget in seconds, one process turns to polishing
when this share is left (or when the search is about to end for lack of gains), unless a plan as good as the best is a
local optimum or is being polished already; the other processes go on. Measured: search_quality, local."""
ENOUGH: Final = 0.25
"""But only if there seems to be time for so much of one look at every alternative: else the chains bring more.
Measured: search_quality, networks on 64 devices."""
SLOWER: Final = 8
"""After every so many climbs, the patience of chains grows by its first value: they cool down more slowly. Taken."""
LENGTH: Final = 100
"""Most proposals of a climb, in units of its patience. Taken: a guard, hardly ever reached."""
FOLD_FROM: Final = 16
"""From so many devices on, climbs over folded plans come too. Taken: fewer devices are searched quickly as they are."""
FOLDS: Final = 2
"""Ways to fold, the one with the smallest blocks first. Taken."""
FULL: Final = 8
"""Blocks are hosts, or parts of so many devices of larger ones. Taken: what larger servers hold."""
NEAR: Final = 0.05
"""Climbs use the bucket sizes with which some start costs at most this share more than the best one. Measured:
20 s of processor time, one process, seeds 0 to 2: Inception-v3 on 16 P100 has 44.3, 45.6, 45.9 ms instead of 46.2,
46.0, 46.2; ResNet-101 and NMT on 16 (10 s) are within what their seeds differ by."""
FOLDED_STARTS: Final = 3
"""Starts for each of them, the best ones. Taken."""
UNFOLD_S: Final = 1.0
UNFOLDING: Final = 20
"""A folded climb evaluates its best plan unfolded so often (s), or after so many times what that takes. Of no influence
on what is found but where a clock ends the climb. Taken."""
SHARE: Final = 4
"""With a budget of proposals, a climb makes at most this many times the patience, or one part in WINDOW of the budget,
whichever is more: the rest is for other climbs. Taken."""
REBUCKET: Final = 0.01
"""The best plan gets another bucket size at the end if that gains this share of its time. A smaller gain is not worth
giving up a local optimum for. Taken."""
SYNCHRONISE_BY: Final = 0.005
"""A baseline gets another way to sum gradients if that gains this share of its time. Taken: half of what a plan that
was searched for must gain, since those are compared with it."""
SIMPLER: Final = 0.01
"""Share of the time that a simpler plan may cost. Taken: predictions err by more, and what nobody can read nobody
checks."""
ROUNDS: Final = 4
"""A simpler plan may be simplified further, so often at most. Taken: more never brought anything."""
SIMPLIFYING: Final = 0.1
"""Simplifying the answer may take what the search has left of a budget in seconds, and this share of it on top. Taken:
it takes less, but where one plan takes long."""

MOST_TEMPLATES: Final = 2**31
"""With more bytes of templates, a process forgets them before its next climb, or a search of many minutes would take
all memory. Taken: a search for Inception-v3 on 16 P100 takes 2 GB in all after a minute."""

# ---- splits of their own for gradients of weights

GRADIENT_STARTS: Final = 3
"""Climbs, from the best of the starts. Taken."""
GRADIENT_ONE_BY_ONE: Final = 32
"""Splits that are tried to be left out one by one, at most: each takes a whole simulation. Taken."""
GRADIENT_WORTH: Final = 1e-3
"""Share of the time that a split of its own must bring. Taken: less is not worth an entry in the file."""

# ---- how often something is looked at: of no influence on what is found

ROWS: Final = 128
"""Proposals between two looks at the clock."""
LOOK: Final = 32
"""Most alternatives between two looks at the clock."""
LOOK_S: Final = 0.02
"""Seconds between two looks at the clock within so many proposals, where templates take long to make."""
LATE_S: Final = 0.3
"""Workers are started only in searches that take longer than this."""
