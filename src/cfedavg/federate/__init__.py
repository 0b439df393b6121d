"""Federations of real nodes: error feedback stays right if replies get lost, clients die or servers restart.

Error feedback is bookkeeping. For every client, at every moment:

    sum of g  =  A + e + U + X

g: the updates that the client computed. A: their part in the server's durable model. e: the client's
residual. U: the client's last payload, if it is neither in the durable model nor back in e. X: what disk
faults lost, by cause. This is the law of the feedback `ef`. Another feedback keeps another memory in the
place of e and states its own law (see `cfedavg.feedback`). The protocol needs two functions of a feedback:
one sends an update, the other restores the memory after a message got lost.

The server keeps three rules.
1. Each round has a number. The server stores the number before it dispatches the round. A restarted server
   repeats the round with the same model and number. No other round ever has that number.
2. The server accepts only replies to the present number, one from each client.
3. Before the next dispatch, the server stores the model and the list of the answers that the model holds, in
   one step.

The client keeps three rules.
1. Before it sends, the client stores its new residual and its payload, in one step.
2. A payload counts as delivered only if the server says so: a request names the client's last answer that is
   in the model. A request decides about all earlier answers. So a payload that the request does not name goes
   back into the residual.
3. If the model holds an answer that the client did not give, or has put back into its residual, the client's
   state is stale. The client then restarts with an empty residual.

If the broadcast is compressed too, every client keeps a model copy: a copy of the server's w, with a version.
Before it sends, the client stores its copy in one step with its residual and its answer. So an answer in the
model tells the server a version that the client has reached. The next request leads from that version to the
present one. A client whose copy cannot follow says so, changes nothing, and gets the whole model in the same
round. The server stores its state before it sends anything made from the state, also requests to evaluate.

`client` and `server` are two state machines without I/O: functions from states and messages to new ones. The
stores, Flower and the fault tests use these two machines. docs/protocol.md draws the faults that the protocol
survives, and says why.
"""
