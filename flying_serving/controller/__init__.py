"""The controller of one server: events in, commands out, time as an argument. No torch, no vLLM.

`Controller` owns one `ClusterState` and the parts that share it. No part inherits another.

- `GroupChoice` chooses the group of a request.
- `Bookings` books requests in groups, and takes them out again, also to migrate.
- `Splitter` gives a request two groups, and plans again where its length turns out otherwise.
- `Dispatcher` offers groups to the requests that wait.
- `Changeover` takes the switch under way from phase to phase.
- `Decider` asks the policy for the next layout.
- `FaultRecovery` takes the requests of lost engines elsewhere.
- `Admission` refuses requests while too many wait.

The parts share the state: waiting requests (`TaskPool`), groups with their requests (`Loads`) and
requests with two groups (`Splits`). The state also has past and present switches (`Switches`),
the room of groups (`Rooms`), the weights that they lend to their KV cache for extra room
(`WeightLending`), and what followed the forecasts of past switches (`Hindsight`).

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
