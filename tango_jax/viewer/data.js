// Decodes the page's payloads: base64 of gzip in script elements -> text, columns, rollouts. See viewer/pack.py.

const $ = (id) => document.getElementById(id);

async function unpack(base64) {
  const binary = atob(base64);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

const payload = (name) => unpack($(`data-${name}`).textContent);
const payloadJson = async (name) => JSON.parse(await payload(name));

// Columns as typed arrays, so that a filter can scan all of them in a millisecond.
function typedColumns(raw) {
  const { labels, ids, chunk, files = null, flags, ...numbers } = raw;
  const columns = { labels, ids, chunk, files, flagLabels: flags, count: numbers.turn.length };
  columns.flagNames = Object.keys(flags);
  for (const [name, values] of Object.entries(numbers)) columns[name] = Int32Array.from(values);
  return columns;
}

// The texts without their JSON syntax; a match never spans two texts.
const searchable = (line) => JSON.parse(line).join("\0").toLowerCase();

// A chunk of a bundle is a script beside the page, which hands its contents over by calling tangoChunk. Pages that are
// opened from disk may load scripts, but not read files.
const arrived = new Map(); // file -> what to do with its contents
window.tangoChunk = (file, base64) => arrived.get(file)?.(base64);

function loadFile(file) {
  return new Promise((resolve, reject) => {
    const script = h("script", { src: `data/${file}` });
    arrived.set(file, resolve);
    script.onload = () => script.remove();
    script.onerror = () => reject(new Error(`data/${file} is missing beside this page`));
    document.head.append(script);
  });
}

// Rollouts, decoded chunk by chunk on demand.
const MAX_HELD = 48; // chunks that are kept decoded; the texts of all of them stay, once they have been searched

function makeStore(columns) {
  const numChunks = Math.ceil(columns.count / columns.chunk);
  const chunks = new Map(); // number -> promise of the chunk's lines
  const lowered = new Array(columns.count).fill(null); // each rollout's texts in lower case
  let loaded = 0;
  let loading = null;

  async function read(number) {
    const text = columns.files ? unpack(await loadFile(columns.files[number])) : payload(`chunk-${number}`);
    return (await text).split("\n");
  }

  function lines(number) {
    const found = chunks.get(number) ?? read(number);
    chunks.delete(number);
    chunks.set(number, found); // the latest comes last
    if (columns.files && chunks.size > MAX_HELD) chunks.delete(chunks.keys().next().value);
    return found;
  }

  async function rollout(index) {
    const of = await lines(Math.floor(index / columns.chunk));
    const place = index % columns.chunk;
    const [id, question, answer, solution, ...verifications] = JSON.parse(of[place]);
    const rest = JSON.parse(of[of.length / 2 + place]);
    Object.assign(rest.problem, { id, question, answer });
    rest.solution.text = solution;
    rest.verifications.forEach((item, i) => {
      item.text = verifications[i];
    });
    return rest;
  }

  // Loads all texts for searching, one chunk after the other so that the page stays responsive.
  function loadAll() {
    loading ??= (async () => {
      for (let number = 0; number < numChunks; number++) {
        const of = await lines(number);
        for (let i = 0; i < of.length / 2; i++) lowered[number * columns.chunk + i] = searchable(of[i]);
        loaded = number + 1;
        if (number % 8 === 7) await new Promise((resume) => setTimeout(resume));
      }
    })();
    return loading;
  }

  // 1 for every rollout whose texts contain the query, ignoring case.
  async function search(query) {
    await loadAll();
    const wanted = query.toLowerCase();
    return Uint8Array.from(lowered, (text) => (text.includes(wanted) ? 1 : 0));
  }

  return { rollout, search, loadAll, progress: () => (numChunks ? loaded / numChunks : 1) };
}
