// The program, read from its listing: one regular expression a line.

async function unpacked() {
  const text = atob($("#data").textContent), bytes = new Uint8Array(text.length);
  for (let k = 0; k < text.length; k++) bytes[k] = text.charCodeAt(k);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

const INSTRUCTION = /^  @(\d+) +(\S+)  +(.+?)  +(?:(\d+) × )?(\d+)  +(.*)$/;
const BUFFER = /^  sram  (\S+) +(.+?)  +0x([0-9a-f]+) \+(\d+) +(always|state|(\d+)\.\.(\d+))/;

function readListing(lines, cycles) {
  const instructions = [], buffers = [], cores = [];
  let core = "";
  lines.forEach((text, index) => {
    let match;
    if ((match = /^core (\S+)/.exec(text))) cores.push((core = match[1]));
    else if ((match = INSTRUCTION.exec(text))) {
      const duration = Number(match[5]) * Number(match[4] || 1);
      const rest = match[6].split(/ {2,}/), source = rest.find((part, i) => i && /:\d+$/.test(part)) || "";
      const routes = (/ link (.*)$/.exec(rest[0]) || ["", ""])[1];
      instructions.push({ index, core, start: Number(match[1]), units: match[2].split("+"), action: match[3], duration, source, routes });
    } else if ((match = BUFFER.exec(text))) {
      const always = match[6] === undefined;
      buffers.push({
        core, name: match[1], address: parseInt(match[3], 16), size: Number(match[4]),
        from: always ? 0 : Number(match[6]), to: always ? cycles : Number(match[7]),
      });
    }
  });
  return { instructions, buffers, cores };
}

const data = await unpacked();
const { instructions, buffers, cores } = readListing(data.stages.listing, data.cycles);
const byLine = new Map(instructions.map((i) => [i.index, i]));
const critical = new Map(data.critical.map(([line, kind]) => [line - 1, kind]));
