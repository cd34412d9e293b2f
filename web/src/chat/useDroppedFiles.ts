import { type DragEvent, useRef, useState } from "react";
import { listFiles, readDrop } from "../lookup/entries";
import type { Found } from "../lookup/gather";
import { isLongText, readFiles, type Sight } from "./files";
import { type Attached, NOTHING_ATTACHED } from "./types";

/** Why files were not taken; `blind` is what was said of the model. */
const NONE_REFUSED: { reasons: string[]; blind: string | null } = { reasons: [], blind: null };

/** The files that the person put into the message being written, by dropping, choosing or pasting them. */
export function useDroppedFiles(sight: Sight, onFolder: (name: string, list: () => Promise<readonly Found[]>) => void) {
  const [dropped, setDropped] = useState<Attached>(NOTHING_ATTACHED);
  const [refused, setRefused] = useState(NONE_REFUSED);
  const [reading, setReading] = useState(0);
  const [isOver, setIsOver] = useState(false);
  const depth = useRef(0);
  const takeFiles = async (given: Iterable<File>) => {
    const all = [...given];
    for (const file of all.filter(isLongText)) onFolder(file.name, async () => [{ path: file.name, file }]);
    const files = all.filter((file) => !isLongText(file));
    if (files.length === 0) return;
    setReading((count) => count + 1);
    const result = await readFiles(files, { ...sight, room: sight.room - dropped.pictures.length });
    setDropped(({ files, pictures }) => ({
      files: [...files, ...result.read.files],
      pictures: [...pictures, ...result.read.pictures],
    }));
    setRefused({ reasons: result.refused, blind: sight.blind });
    setReading((count) => count - 1);
  };
  const enter = (change: number) => {
    depth.current = Math.max(0, depth.current + change);
    setIsOver(depth.current > 0);
  };
  /** Another model may have been chosen since: it may see, or not see what was added for the one before. */
  const listReasons = (): string[] => {
    const reasons = refused.reasons.filter((reason) => reason !== refused.blind || reason === sight.blind);
    const isSeen = dropped.pictures.length > 0 || dropped.files.some(({ url }) => url);
    return sight.blind === null || !isSeen ? reasons : [...new Set([...reasons, sight.blind])];
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
      const { files, folders } = readDrop(event.dataTransfer);
      void takeFiles(files);
      for (const folder of folders) onFolder(folder.name, () => listFiles(folder));
    },
  };
  return {
    dropped,
    refused: listReasons(),
    /** Some are not read yet, so a message that is sent now would go without them. */
    isReading: reading > 0,
    isOver,
    handlers,
    takeFiles,
    remove: (kind: keyof Attached, index: number) =>
      setDropped((before) => ({ ...before, [kind]: before[kind].filter((_, at) => at !== index) })),
    /** Forget what was sent. */
    clear: (sent: Attached) => {
      setDropped(({ files, pictures }) => ({
        files: files.filter((file) => !sent.files.includes(file)),
        pictures: pictures.filter((picture) => !sent.pictures.includes(picture)),
      }));
      setRefused(NONE_REFUSED);
    },
  };
}

function hasFiles(event: DragEvent): boolean {
  return event.dataTransfer.types.includes("Files");
}
