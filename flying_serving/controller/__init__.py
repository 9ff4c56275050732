"""The controller of one server: events in, commands out, time as an argument. No torch, no vLLM.

`Controller` (`controller.py`) owns one `ClusterState` and the parts that share it. No part inherits
another. The parts:

- `group_choice.py`: `GroupChoice` chooses the group of a request. `price.py`: its price in a group.
  `reserving_choice.py`, `reservation.py`: the choice by memory, with room kept for a long request.
- `bookings.py`: `Bookings` books requests in groups, and takes them out again, also to migrate.
- `splitter.py`: `Splitter` gives a request two groups, and plans again where its length turns out
  otherwise.
- `dispatcher.py`: `Dispatcher` offers groups to the requests that wait. `deadlines.py`: how long
  they may wait.
- `changeover.py`: `Changeover` takes the switch under way from phase to phase.
- `decider.py`: `Decider` asks the policy for the next layout. `snapshots.py`: what the policy sees.
- `fault_recovery.py`: `FaultRecovery` takes the requests of lost engines elsewhere. `suspicion.py`:
  requests that may have caused the loss.
- `admission.py`: `Admission` refuses requests while too many wait. `queue_slots.py`: slots of
  requests that are admitted and have not arrived.

The state that the parts share (`state.py`):

- `pool.py`: requests that wait (`TaskPool`). `requests.py`: what is known of a request.
- `loads.py`: groups with their requests (`Loads`). `node_load.py`: the load of the whole node.
- `splits.py`: requests with two groups (`Splits`). `lengths.py`: probable lengths of requests.
- `switches.py`: past and present switches (`Switches`). `gaps.py`: the longest times between two
  tokens, which are a switch's cost. `hindsight.py`: what followed the forecasts of past switches.
- `rooms.py`: the tokens that groups hold (`Rooms`). `weight_lending.py`: the weights that they lend
  to their KV cache for extra room (`WeightLending`).

`commands.py` has the commands, and `settings.py` the settings of a start.

The method of each event notes the event. Then `Controller._settle` advances, in this order:

1. The switch under way (`Changeover.advance`). It goes on in another mode if it has waited for too
   long. Weights come back to engines that need them (`WeightLending.fetch`). If the switch waits
   for nothing more, engines are told of it.
2. Requests that wait (`Dispatcher.dispatch_waiting`) get groups. A group lends its weights to a
   request that waits for them (`WeightLending.lend`).
3. The layout. It is made again after a loss (`FaultRecovery.take_restored`). Otherwise the policy
   is asked (`Decider.decide`), once, at events that may change its answer. If a switch begins, the
   order starts again at 1. While one is under way, no other begins.

An arrival ends nothing that a switch or weights wait for, so it begins at 2.

docs/architecture.md has the way of a request and that of a switch, file by file.
"""
