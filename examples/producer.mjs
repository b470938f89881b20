// A producer with nothing but a NATS client: publishes a task of hello.py, then asks over HTTP what became of it.
//
//   npm install @nats-io/transport-node
//   node producer.mjs [nats://127.0.0.1:4222] [http://127.0.0.1:8420]
import { connect } from "@nats-io/transport-node";

const [natsUrl = "nats://127.0.0.1:4222", httpUrl = "http://127.0.0.1:8420"] = process.argv.slice(2);
const subject = "mill.submit.acme.default"; // mill.submit.<tenant>.<queue>
const task = { task_type: "hello.greet", payload: { name: "Grace" }, idempotency_key: "node-producer:grace" };

const connection = await connect({ servers: natsUrl });
// A JetStream publish is a request whose answer is the PubAck: it says that the task is stored.
const ack = (await connection.request(subject, JSON.stringify(task), { timeout: 5_000 })).json();
await connection.close();
if (ack.error || ack.duplicate) throw new Error(`not accepted: ${JSON.stringify(ack)}`);
console.log(`accepted as ${ack.seq} of ${ack.stream}`);

const get = async (path) => (await fetch(httpUrl + path)).json();
const over = new Set(["completed", "failed", "cancelled", "expired"]);
for (;;) {
  const [found] = (await get(`/v1/tasks?inbox_seq=${ack.seq}`)).items;
  if (found && over.has(found.state)) {
    const { state, result } = await get(`/v1/tasks/${found.task_id}?tenant=acme`);
    console.log(state, JSON.stringify(result));
    break;
  }
  await new Promise((wake) => setTimeout(wake, 100));
}
