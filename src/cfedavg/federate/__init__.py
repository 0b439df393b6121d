"""Federations of real nodes: error feedback stays right if replies get lost, clients die or servers restart.

Error feedback is bookkeeping. For every client, at every moment:

    sum of g  =  A + e + U + X

g: the updates that the client computed. A: the part of these updates that is in the server's stored model.
e: the client's residual. U: the client's last payload, while it is neither in the stored model nor back in e.
X: what disk faults lost. This is the law of the feedback `ef`. Another feedback keeps another memory in the
place of e and states its own law (see `cfedavg.feedback`). The protocol needs two functions of a feedback:
one sends an update, the other restores the memory after a message got lost.

An answer is a client's reply to a request to train. The model holds an answer as soon as the server has added
the answer's payload to the model.

The server keeps three rules.
1. Each round has a number. The server stores the number before it dispatches the round. A restarted server
   repeats the round with the same model and number. No other round ever has that number.
2. The server accepts only answers to requests with the present round's number, one from each client.
3. Before the next round, the server stores the model and the list of the answers that the model holds, in one
   step.

The client keeps three rules.
1. Before it sends, the client stores its new residual and its payload, in one step.
2. A payload counts as delivered only if the server says so. Each request names the client's last answer that
   the model holds. If this is not the answer that the client sent last, the last payload did not arrive, and
   the client puts it back into its residual.
3. If the model holds an answer that the client did not give, or that the client has put back into its
   residual, the client's state is outdated. The client then restarts with an empty residual.

If the broadcast is compressed too, the server and every client keep a model copy w, which has a version. A
client stores its model copy in one step with its residual and its answer. So if the model holds an answer,
the server knows that the client has reached the version from which it made this answer. The next broadcast
leads from that version to the present one. If a client's copy cannot follow the broadcast, the client says so
and changes nothing. It then gets the whole model in the same round. The server stores its state before it
sends anything made from the state. This also holds for requests to evaluate.

`client` and `server` are two state machines without I/O: functions that take a state and a message, and
return a new state and a message. The stores, Flower and the fault tests use these two machines.
docs/protocol.md draws the faults that the protocol survives, and says why.
"""
