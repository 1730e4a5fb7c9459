// Colours for code: comments, strings, numbers, keywords, and what is called. One line at a time is enough to read by.

const PYTHON = /(#.*$)|("""(?:[^"]|"(?!""))*"""|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|\b(\d[\w.]*)\b|\b(def|return|with|for|in|if|else|elif|import|from|as|class|lambda|not|and|or|del|None|True|False|self|raise|yield)\b|([\w.]+)(?=\()/g;
const LLVM = /(;.*$)|("(?:[^"\\]|\\.)*")|\b(\d[\w.]*)\b|\b(define|declare|ret|br|label|load|store|phi|call|icmp|fcmp|select|add|sub|mul|fadd|fsub|fmul|fdiv|getelementptr|bitcast|void|float|double|half|ptr|i1|i8|i16|i32|i64)\b|([@%][\w.$-]+)/g;
const MLIR = /(\/\/.*$)|("(?:[^"\\]|\\.)*")|\b(\d[\w.]*)\b|\b(tile\.\w+|builtin\.\w+|f32|f64|f16|bf16|i1|i8|i16|i32|i64|index)\b|([@%^][\w.$-]+)/g;
const GRAMMARS = { python: PYTHON, llvm: LLVM, mlir: MLIR };

// Lines of a file that stand inside a string of several lines.
const quotes = new Map();
function quoted(file) {
  if (!quotes.has(file)) {
    const inside = new Set();
    let open = false;
    data.files[file].lines.forEach((line, i) => {
      const before = open;
      if ((line.split(/"""|\'\'\'/).length - 1) % 2) open = !open;
      if (before || open) inside.add(i);
    });
    quotes.set(file, inside);
  }
  return quotes.get(file);
}

function painted(text, language) {
  const made = el("span", { class: language === "prose" ? "text s" : "text" });
  if (language === "prose" || text.length > 1000) {
    made.textContent = text;
    return made;
  }
  let last = 0;
  for (const found of text.matchAll(GRAMMARS[language] || PYTHON)) {
    const kind = ["c", "s", "n", "k", "f"][found.slice(1).findIndex((group) => group !== undefined)];
    if (found.index > last) made.append(text.slice(last, found.index));
    made.append(el("span", { class: kind, text: found[0] }));
    last = found.index + found[0].length;
  }
  made.append(text.slice(last));
  return made;
}
