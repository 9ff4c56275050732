"""The controller of one server: events in, commands out, time as an argument. Neither torch nor vLLM.

`Controller` owns one `ClusterState` and the parts that share it. No part inherits another.

- `GroupChoice` chooses the group of a request.
- `Bookings` books requests in groups, and takes them out again.
- `Splitter` gives a request two groups.
- `Dispatcher` offers groups to the requests that wait.
- `Changeover` takes the switch under way from phase to phase.
- `Decider` asks the policy for the next layout.
- `FaultRecovery` takes the requests of lost engines elsewhere.
- `Admission` refuses requests while too many wait.

The state has what they share: waiting requests (`TaskPool`), groups with their requests (`Loads`),
requests with two groups (`Splits`), past and present switches (`Switches`), and the weights that
groups lend to their KV cache (`WeightLending`).

Each event notes what has happened. Then `Controller._settle` advances, in this order:

1. the switch under way (`Changeover.advance`): in another mode if it has waited for too long;
   weights come back to engines that need them (`WeightLending.fetch`); engines are told of the
   switch, if it waits for nothing more;
2. requests that wait (`Dispatcher.place_waiting`): they get groups; a group lends its weights to a
   request that waits for them (`WeightLending.lend`);
3. the layout: it is made again after a loss (`FaultRecovery.take_restored`), or, at events that may
   change the policy's answer, the policy is asked (`Decider.decide`), once. If a switch begins, the
   order starts again at 1; while one is under way, no other begins.
"""
