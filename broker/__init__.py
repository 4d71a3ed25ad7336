"""The client's side of Forebay: `Client`, its synchronous facade, and what they give."""

from broker.assembly import StreamRestarted
from broker.client import Client
from broker.errors import ClientClosed, ClientError, ClientTimeout, TooManyWaiting
from broker.steering import engine_change, tenant_change
from broker.subscription import Found, Subscription
from broker.sync import SyncClient
from broker.waiting import ResultStream

__all__ = [
    "Client",
    "ClientClosed",
    "ClientError",
    "ClientTimeout",
    "Found",
    "ResultStream",
    "StreamRestarted",
    "Subscription",
    "SyncClient",
    "TooManyWaiting",
    "engine_change",
    "tenant_change",
]
