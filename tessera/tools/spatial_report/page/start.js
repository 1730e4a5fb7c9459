startFacts();
startColumns();
startGantt();
startMesh();
startMemory();
window.addEventListener("resize", () => { drawGantt(); drawMesh(Number($("#mesh input").value)); drawMemory(); });
document.documentElement.dataset.ready = "yes";
