import { type DBSchema, type IDBPDatabase, openDB } from "idb";

/**
 * A function that opens a database of the browser once, and again after it failed or the browser ended it. It gives way
 * to a tab that wants to change or delete the database.
 */
export function keepOpen<Schema extends DBSchema>(
  name: string,
  create: (db: IDBPDatabase<Schema>) => void,
): () => Promise<IDBPDatabase<Schema>> {
  let opened: Promise<IDBPDatabase<Schema>> | null = null;
  return () => {
    opened ??= openDB<Schema>(name, 1, {
      upgrade: create,
      blocking() {
        void opened?.then((db) => db.close());
        opened = null;
      },
      terminated() {
        opened = null;
      },
    });
    opened.catch(() => {
      opened = null;
    });
    return opened;
  };
}
