import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { findSight, type Model } from "../api/models";
import { readFiles } from "./files";
import { fitSize, isPictureUrl, readPicture } from "./pictures";

const SEES = { blind: null, room: 16 };
let size = { width: 0, height: 0 };
let encoded: { type: string; quality: number }[] = [];

/** A browser that decodes what begins with "picture", and whose JPEGs shrink with their quality. */
beforeEach(() => {
  encoded = [];
  vi.stubGlobal("createImageBitmap", async (file: File, options: ImageBitmapOptions) => {
    expect(options.imageOrientation).toBe("from-image");
    if (!(await file.text()).startsWith("picture")) throw new DOMException("broken", "InvalidStateError");
    return { ...size, close: () => undefined };
  });
  const context = { fillRect: () => undefined, drawImage: () => undefined };
  vi.spyOn(HTMLCanvasElement.prototype, "getContext").mockReturnValue(context as never);
  vi.spyOn(HTMLCanvasElement.prototype, "toBlob").mockImplementation((take, type = "", quality = 0) => {
    encoded.push({ type, quality });
    take(new Blob(["j".repeat(quality * 1_700_000)], { type }));
  });
});

afterEach(() => vi.unstubAllGlobals());

function file(text: string, name: string, type: string): File {
  return new File([text], name, { type });
}

describe("a picture", () => {
  it("is sent as it is where it is small", async () => {
    size = { width: 2048, height: 30 };
    const picture = await readPicture(file("picture", "a.png", "image/png"));
    expect(picture).toEqual({ name: "a.png", url: "data:image/png;base64,cGljdHVyZQ==", width: 2048, height: 30 });
    expect(isPictureUrl(picture.url)).toBe(true);
    expect(encoded).toEqual([]);
  });

  it("is made smaller where it is large, has many bytes, or is of a kind that the server does not read", async () => {
    size = { width: 3000, height: 6000 };
    expect(await readPicture(file("picture", "a.jpg", "image/jpeg"))).toMatchObject({ width: 1024, height: 2048 });
    expect(encoded).toEqual([
      { type: "image/jpeg", quality: 0.9 },
      { type: "image/jpeg", quality: 0.75 },
    ]);
    size = { width: 3, height: 6 };
    const many = file(`picture${"x".repeat(1_500_000)}`, "a.png", "image/png");
    for (const one of [many, file("picture", "a.tiff", "image/tiff")])
      expect((await readPicture(one)).url).toMatch(/^data:image\/jpeg;base64,/);
  });

  it("keeps its shape, and at least a pixel", () => {
    expect(fitSize(4096, 1)).toEqual({ width: 2048, height: 1 });
    expect(fitSize(100, 50)).toEqual({ width: 100, height: 50 });
  });

  it("is refused in words where it cannot be taken", async () => {
    size = { width: 2, height: 2 };
    const broken = file("nothing", "a.heic", "image/heic");
    const pictures = ["b.png", "c.png", "d.png"].map((name) => file("picture", name, "image/png"));
    const drawing = file("<svg/>", "e.svg", "image/svg+xml");
    const { read, refused } = await readFiles([broken, ...pictures, drawing], { blind: null, room: 2 });
    expect(read.pictures.map(({ name }) => name)).toEqual(["b.png", "c.png"]);
    expect(read.files).toEqual([{ name: "e.svg", text: "<svg/>" }]);
    expect(refused).toEqual([
      "“a.heic” is a picture that this browser cannot read. Save it as PNG or JPEG first.",
      "A conversation takes 16 pictures. Remove one or start a new chat.",
    ]);
    const blind = await readFiles(pictures, { ...SEES, blind: "demo reads text only." });
    expect(blind).toEqual({ read: { files: [], pictures: [] }, refused: ["demo reads text only."] });
  });
});

it("a PDF without text is kept for a model that sees, and refused for others", async () => {
  const told = { error: { message: "file: has no text; its pages are pictures, as those of a scanner" } };
  vi.stubGlobal("fetch", async () => new Response(JSON.stringify(told), { status: 400 }));
  const scan = file("%PDF", "scan.pdf", "");
  const { read, refused } = await readFiles([scan], SEES);
  expect(read.files).toEqual([{ name: "scan.pdf", text: "", url: "data:application/pdf;base64,JVBERg==" }]);
  expect(refused).toEqual([]);
  const blind = await readFiles([scan], { ...SEES, blind: "demo reads text only." });
  expect(blind.refused).toEqual(["“scan.pdf”: has no text; its pages are pictures, as those of a scanner"]);
});

it("knows whether a model sees, also by an alias of Ollama's and of an adapter's model", () => {
  const model = (id: string, capabilities: string[] | null, parent: string | null = null): Model => ({
    id,
    created: 0,
    owned_by: "mlxr",
    parent,
    capabilities,
  });
  const models = [model("eyes", ["completion", "vision"]), model("text", ["completion"]), model("ad", null, "eyes")];
  expect(["eyes", "eyes:latest", "text", "ad", "gone"].map((name) => findSight(models, name))).toEqual([
    true,
    true,
    false,
    true,
    null,
  ]);
  expect(findSight(undefined, "eyes")).toBeNull();
});
