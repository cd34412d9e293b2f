import { type DragEvent, useRef, useState } from "react";
import { readFiles } from "./files";
import type { Attachment } from "./types";

/** The text files that the person put into the message being written, by dropping or choosing them. */
export function useDroppedFiles() {
  const [dropped, setDropped] = useState<Attachment[]>([]);
  const [refused, setRefused] = useState<string[]>([]);
  const [isOver, setIsOver] = useState(false);
  const depth = useRef(0);
  const takeFiles = async (files: Iterable<File>) => {
    const result = await readFiles(files);
    setDropped((before) => [...before, ...result.read]);
    setRefused(result.refused);
  };
  const enter = (change: number) => {
    depth.current = Math.max(0, depth.current + change);
    setIsOver(depth.current > 0);
  };
  const handlers = {
    onDragEnter: (event: DragEvent) => hasFiles(event) && enter(1),
    onDragLeave: (event: DragEvent) => hasFiles(event) && enter(-1),
    onDragOver: (event: DragEvent) => hasFiles(event) && event.preventDefault(),
    onDrop: (event: DragEvent) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      depth.current = 0;
      setIsOver(false);
      void takeFiles([...event.dataTransfer.files]);
    },
  };
  return {
    dropped,
    refused,
    isOver,
    handlers,
    takeFiles,
    removeFile: (index: number) => setDropped((before) => before.filter((_, at) => at !== index)),
    clear: () => {
      setDropped([]);
      setRefused([]);
    },
  };
}

function hasFiles(event: DragEvent): boolean {
  return event.dataTransfer.types.includes("Files");
}
