// Golden weights and inputs without a file: refimpl's hash, in JavaScript.  node init.js SEED NAME N OFFSET SCALE
//
// value(name, i)  = offset + n * scale / 2^23,  n: draw i of the stream of name, less 2^23; with an offset its lowest bit is 0
// token(step, i)  = an integer below the vocabulary, for position i of [B, T + 1] in C order; targets are the tokens that follow
// ignored(step, i): whether the target at position i of [B, T] is ignored (-100)
// i counts in the whole array, in C order, so a shard is made alone: for row r and column c of [R, C] take i = r * C + c.
// Names, shapes, offsets and scales are in a bundle's manifest, under "weights".
const u64 = (x) => BigInt.asUintN(64, x);

function mix64(z) {
  z = u64((z ^ (z >> 30n)) * 0xBF58476D1CE4E5B9n);
  z = u64((z ^ (z >> 27n)) * 0x94D049BB133111EBn);
  return z ^ (z >> 31n);
}

function fnv1a64(text) {
  let h = 0xCBF29CE484222325n;
  for (const byte of new TextEncoder().encode(text)) h = u64((h ^ BigInt(byte)) * 0x100000001B3n);
  return h;
}

const stream = (seed, name) => mix64(fnv1a64(name) ^ mix64(u64(BigInt(seed))));
const streamOfStep = (seed, name, step) => mix64(stream(seed, name) ^ mix64(u64(BigInt(step))));
const draw24 = (key, i) => Number(mix64(u64(key + (BigInt(i) + 1n) * 0x9E3779B97F4A7C15n)) >> 40n);

function value(key, i, offset, scale) {
  let n = draw24(key, i) - 8388608;
  if (offset !== 0) n -= n & 1;
  return offset + n * (scale / 8388608);
}

function token(seed, step, i, vocabulary) {
  const key = streamOfStep(seed, "tokens", step);
  return (draw24(key, 2 * i) * 16777216 + draw24(key, 2 * i + 1)) % vocabulary;     // below 2^48: exact
}

const ignored = (seed, step, i) => draw24(streamOfStep(seed, "ignored", step), i) < 1048576;

// SEED NAME N OFFSET SCALE: the first N values.  SEED tokens STEP N VOCABULARY, SEED ignored STEP N: of a step.
const [seed, what, ...numbers] = process.argv.slice(2);
if (what === "tokens" && numbers.length === 3)
  for (let i = 0; i < +numbers[1]; i++) console.log(token(seed, numbers[0], i, +numbers[2]));
else if (what === "ignored" && numbers.length === 2)
  for (let i = 0; i < +numbers[1]; i++) console.log(+ignored(seed, numbers[0], i));
else if (numbers.length === 3)
  for (let i = 0; i < +numbers[0]; i++) console.log(value(stream(seed, what), i, +numbers[1], +numbers[2]));
else console.error("give SEED NAME N OFFSET SCALE, SEED tokens STEP N VOCABULARY, or SEED ignored STEP N");
