import { type Found, isHidden } from "./gather";

/** More are not even listed. */
const MOST_LISTED = 50_000;

/** The files and folders of what is dropped. They can be asked for only while the event is handled. */
export function readDrop(data: DataTransfer): { files: File[]; folders: FileSystemDirectoryEntry[] } {
  const items = [...data.items].filter(({ kind }) => kind === "file");
  const files: File[] = [];
  const folders: FileSystemDirectoryEntry[] = [];
  for (const item of items) {
    const entry = item.webkitGetAsEntry?.();
    if (entry?.isDirectory) folders.push(entry as FileSystemDirectoryEntry);
    else {
      const file = item.getAsFile();
      if (file) files.push(file);
    }
  }
  return { files, folders };
}

/** All files below a folder that was dropped. Hidden folders are not looked into; what cannot be read is left out. */
export async function listFiles(folder: FileSystemDirectoryEntry): Promise<Found[]> {
  const found: Found[] = [];
  const places: [FileSystemDirectoryEntry, string][] = [[folder, folder.name]];
  for (let place = places.pop(); place && found.length < MOST_LISTED; place = places.pop()) {
    const [directory, path] = place;
    for (const entry of await readEntries(directory)) {
      const below = `${path}/${entry.name}`;
      if (entry.isDirectory) {
        if (!isHidden(entry.name)) places.push([entry as FileSystemDirectoryEntry, below]);
      } else {
        const file = await readFile(entry as FileSystemFileEntry);
        if (file) found.push({ path: below, file });
      }
    }
  }
  return found;
}

async function readEntries(folder: FileSystemDirectoryEntry): Promise<FileSystemEntry[]> {
  const reader = folder.createReader();
  const all: FileSystemEntry[] = [];
  // A reader tells some at a time, and none once it is at the end.
  for (;;) {
    const some = await new Promise<FileSystemEntry[]>((resolve) => reader.readEntries(resolve, () => resolve([])));
    if (some.length === 0) return all;
    all.push(...some);
  }
}

function readFile(entry: FileSystemFileEntry): Promise<File | null> {
  return new Promise((resolve) => entry.file(resolve, () => resolve(null)));
}
