// A producer that knows the NATS client for Node and the wire document, and nothing else of this project.
//
// producer.mjs NATS_URL SUBJECT HTTP_URL TASK_ID: publishes the envelope of standard input, waits for the task's end
// and prints what HTTP says of it.
import { readFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { connect } from "@nats-io/transport-node";

const TERMINAL = ["completed", "failed", "cancelled", "expired"];
const [server, subject, http, taskId] = process.argv.slice(2);

const client = await connect({ servers: server });
const answer = await client.request(subject, readFileSync(0), { timeout: 5000 }); // the answer is the PubAck
const ack = answer.json();
if (ack.error !== undefined || ack.duplicate === true) {
  throw new Error(`not accepted: ${answer.string()}`);
}
await client.close();

const tenant = subject.split(".")[2];
const deadline = Date.now() + 60_000;
let task = null;
while (Date.now() < deadline) {
  const found = await fetch(`${http}/v1/tasks/${taskId}?tenant=${tenant}`);
  if (found.status === 200) {
    task = await found.json();
    if (TERMINAL.includes(task.state)) break;
  } else if (found.status !== 404) {
    throw new Error(`HTTP ${found.status}`);
  }
  await sleep(50);
}
console.log(JSON.stringify({ seq: ack.seq, task }));
